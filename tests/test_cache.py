"""Inductor's caches stay on: what must be shown again on a warm cache is, and what must not be reused is not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import json, sys, warnings
import torch, remat
torch.set_num_threads(1)
torch.manual_seed(0)
options = json.loads(sys.argv[1])
if options.pop("break", False):
    def broken(*_):
        raise remat.UnsupportedGraph("broken on purpose")
    remat.partitioner.decide = broken
calls = []
inner = remat.partitioner.decide
remat.partitioner.decide = lambda *a: (calls.append(1), inner(*a))[1]
w1, w2 = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
def f(x):
    return torch.tanh(torch.tanh(x @ w1).exp() @ w2).sum()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        torch.compile(f, backend="remat", options=options)(torch.ones(4, 8)).backward()
        error = ""
    except Exception as raised:
        error = str(raised)
said = [str(w.message) for w in caught if issubclass(w.category, remat.RematWarning)]
print(json.dumps({"planned": len(calls), "lines": [s.line() for s in remat.summaries()],
    "saved": [s.saved_bytes for s in remat.summaries()], "warnings": said, "error": error}))
"""


def run(cache: Path, root: Path = ROOT, **options: Any) -> dict[str, Any]:
    """Compile and train one step in a process of its own, with its caches under `cache`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("REMAT_", "TORCHINDUCTOR_"))}
    environment.update(TORCHINDUCTOR_CACHE_DIR=str(cache), PYTHONPATH=str(root), OMP_NUM_THREADS="1")
    # `-P` keeps the working folder out of the path, so that `root` decides which remat is imported.
    command = [sys.executable, "-P", "-c", SCRIPT, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cache, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.inductor
def test_a_second_process_reuses_the_code_and_shows_the_same_line(tmp_path: Path) -> None:
    cold, warm = run(tmp_path), run(tmp_path)
    assert cold["planned"] == 1
    assert warm["planned"] == 0, "the compile cache was not used"
    assert warm["lines"] == [line.replace("(planned)", "(cached)") for line in cold["lines"]]

    # A changed setting, and check, must plan anew; strictness is part of the key.
    smallest = run(tmp_path, budget="min")
    assert smallest["planned"] == 1
    assert smallest["saved"] < cold["saved"]
    assert run(tmp_path, check=True)["planned"] == 1
    assert run(tmp_path, dump=str(tmp_path / "dump"))["planned"] == 1
    assert run(tmp_path, strict=True)["planned"] == 1
    assert run(tmp_path, log="plan")["planned"] == 0, "what is printed changes no code"


@pytest.mark.inductor
def test_a_changed_source_file_never_meets_an_old_entry(tmp_path: Path) -> None:
    cache, copy = tmp_path / "cache", tmp_path / "copy"
    cache.mkdir()
    copy.mkdir()
    shutil.copytree(ROOT / "remat", copy / "remat", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "passes", copy / "passes", ignore=shutil.ignore_patterns("__pycache__"))
    assert run(cache, copy)["planned"] == 1
    assert run(cache, copy)["planned"] == 0
    for changed in ("remat/costs.py", "passes/split.py"):
        with (copy / changed).open("a") as file:
            file.write("\n# changed\n")
        assert run(cache, copy)["planned"] == 1, changed


@pytest.mark.inductor
def test_a_cached_fallback_warns_again_and_strict_is_an_error_on_a_warm_cache(tmp_path: Path) -> None:
    cold = run(tmp_path, **{"break": True})
    warm = run(tmp_path)
    assert cold["warnings"] and warm["warnings"] == cold["warnings"]
    strict = run(tmp_path, **{"break": True, "strict": True})
    assert "broken on purpose" in strict["error"]
