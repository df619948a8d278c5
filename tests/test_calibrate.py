"""Calibration and the snapshot: what is measured, what is stored, and which figures a compilation takes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import remat
from remat import cli, devices, snapshot
from remat.calibrate import Calibration, calibrate
from remat.devices import CPU, Device
from remat.errors import RematWarning
from remat.partitioner import Partitioner
from remat.settings import Settings
from remat.store import FORMAT_VERSION, Store

ROOT = Path(__file__).resolve().parents[1]
HERE = torch.device("cpu")
# Everything is as dear as here but for memory, of which there is as good as none.
SLOW_MEMORY = dataclasses.replace(CPU, name="slow memory", bytes_per_second=1e5)
SCRIPT = """
import sys, torch, remat
torch.set_num_threads(1)
def f(x, w):
    return torch.tanh(torch.tanh(x @ w).exp() @ w).sum()
x, w = torch.ones(64, 64, requires_grad=True), torch.ones(64, 64, requires_grad=True)
torch.compile(f, backend="remat", options={"inner": "eager", "memory_weight": 1.001})(x, w).backward()
(summary,) = remat.summaries()
print([value.name for value in summary.saved], summary.saved_bytes, summary.graph, remat.Partitioner().uuid()[3])
"""


def machine() -> snapshot.Machine:
    found = snapshot.machine_of(HERE)
    assert found is not None
    return found


def keep(folder: Path, device: Device = SLOW_MEMORY, **fields: Any) -> Path:
    """Store a calibration as this machine's; returns the document's path."""
    document = {**dataclasses.asdict(machine()), "figures": device.as_dict(), "learned": None} | fields
    Store(folder).update(machine().calibration_name, lambda _: document)
    return Store(folder).path(machine().calibration_name)


def compile_small(folder: Path, **settings: Any) -> remat.PlanSummary:
    """Plan a small function with this folder as the store."""

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ w).exp() @ w).sum()

    torch.compiler.reset()
    options = {"inner": "eager", "cache_dir": str(folder), **settings}
    x, w = torch.ones(64, 64, requires_grad=True), torch.ones(64, 64, requires_grad=True)
    torch.compile(run, backend=remat.remat, options=options)(x, w).backward()
    return remat.summaries()[-1]


def decided(summary: remat.PlanSummary) -> Any:
    return summary.origin, summary.saved, summary.saved_bytes


# --- the snapshot ----------------------------------------------------------------------------------------------


def test_without_a_calibration_the_figures_are_built_in_and_compiling_writes_nothing(tmp_path: Path) -> None:
    found = snapshot.load(HERE, Settings(cache_dir=str(tmp_path)))
    assert (found.device, found.origin, found.learned) == (CPU, "built in", None)
    assert len(found.hash) == 16
    compile_small(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


BROKEN: dict[str, Any] = {
    "no json": "{", "empty": "", "a list": "[]", "another format": {"format": FORMAT_VERSION + 1}, "no figures": {},
    "figures of another kind": {"figures": 3}, "an unknown figure": {"figures": {**CPU.as_dict(), "speed": 1}},
    "a missing figure": {"figures": {"name": "x"}}, "no rate": {"figures": {**CPU.as_dict(), "bytes_per_second": 0}},
    "a text": {"figures": {**CPU.as_dict(), "launch_seconds": "much"}},
    "not a number": {"figures": {**CPU.as_dict(), "cached_bytes_per_second": math.nan}},
    "a negative": {"figures": {**CPU.as_dict(), "attention_flops": [[4, -1.0]]}},
    "learned of another kind": {"figures": CPU.as_dict(), "learned": "all"},
    "another processor": {"device": "another", "figures": SLOW_MEMORY.as_dict()},
    "another torch": {"torch": "1.0", "figures": SLOW_MEMORY.as_dict()},
    "other threads": {"threads": 99, "figures": SLOW_MEMORY.as_dict()},
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_or_foreign_calibration_is_ignored_with_one_warning(tmp_path: Path, how: str) -> None:
    expected = compile_small(tmp_path / "none")
    content = BROKEN[how]
    if isinstance(content, dict):
        content = json.dumps({"format": FORMAT_VERSION, **dataclasses.asdict(machine()), **content})
    folder = tmp_path / "broken"
    folder.mkdir()
    path = folder / machine().calibration_name
    path.write_text(content)
    with pytest.warns(RematWarning) as caught:
        found = compile_small(folder)
        assert snapshot.load(HERE, Settings(cache_dir=str(folder))).origin == "built in"
    assert decided(found) == decided(expected)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, RematWarning)]
    assert len(said) == 1 and str(path) in said[0]


def test_a_store_that_is_a_file_is_ignored_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RematWarning) as caught:
        found = compile_small(tmp_path / "file")
    assert found.origin != "fallback"
    assert len([warning for warning in caught if issubclass(warning.category, RematWarning)]) == 1


def test_a_stored_calibration_is_used_and_is_part_of_the_compile_caches_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before, key = snapshot.load(HERE, Settings()), Partitioner().uuid()
    keep(tmp_path / "remat")
    after = snapshot.load(HERE, Settings())
    assert (after.device, after.origin) == (SLOW_MEMORY, "calibrated")
    assert after.hash != before.hash
    if not torch.cuda.is_available():  # else the key holds the GPU's figures
        assert Partitioner().uuid() != key
    assert Partitioner(figures=after.hash).uuid() != Partitioner(figures=before.hash).uuid()
    keep(tmp_path / "remat", CPU)
    assert snapshot.load(HERE, Settings()).hash == before.hash, "figures alone decide, not where they are from"


def test_a_stored_calibration_changes_the_plan(tmp_path: Path) -> None:
    keep(tmp_path / "kept")
    plans = [compile_small(tmp_path / folder, memory_weight=1.001) for folder in ("none", "kept")]
    saved = [{value.name for value in plan.saved if value.name in ("mm", "tanh")} for plan in plans]
    assert saved == [{"tanh"}, {"mm"}], "where memory is slow, tanh is not written for the backward to read"
    assert plans[0].graph != plans[1].graph, "what is remembered of one is not shown for the other"


def test_the_hash_covers_timings_only_where_the_prices_do(tmp_path: Path) -> None:
    keep(tmp_path)
    name = snapshot.timings_name(HERE, machine())

    def hashes() -> dict[str, str]:
        costs = ("roofline", "profile", "learned")
        return {cost: snapshot.load(HERE, Settings(cost=cost, cache_dir=str(tmp_path))).hash for cost in costs}

    before = hashes()
    Store(tmp_path).update(name, lambda _: {"generation": "abc", "samples": {}})
    after = hashes()
    assert [cost for cost in before if before[cost] != after[cost]] == ["profile", "learned"]


def test_a_pretended_gpu_and_one_that_is_not_here_have_the_built_in_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(cache_dir=str(tmp_path))
    if not torch.cuda.is_available():
        assert snapshot.load(torch.device("cuda"), settings).device.name == "A100"
    monkeypatch.setattr(devices, "_pretended", [devices.named("H200")])
    assert snapshot.machine_of(torch.device("cuda:0")) is None
    assert snapshot.load(torch.device("cuda:0"), settings).device is devices.named("H200")


def test_another_number_of_threads_is_another_machine() -> None:
    one = machine()
    torch.set_num_threads(2)
    assert machine() != one and machine().calibration_name != one.calibration_name
    assert os.sep not in one.calibration_name


def test_two_processes_with_the_same_store_choose_the_same_plan(tmp_path: Path) -> None:
    keep(tmp_path / "remat")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("REMAT_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", SCRIPT]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    first, second = (process.communicate(timeout=120)[0] for process in running)
    assert [process.returncode for process in running] == [0, 0]
    assert first == second
    if not torch.cuda.is_available():
        hash_ = snapshot.load(HERE, Settings(cache_dir=str(tmp_path / "remat"))).hash
        assert first.split()[-1].strip("'") == hash_, "the stored figures were used"


# --- measuring ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """One calibration of this CPU: what it gave, where, how long it took, and random states around it."""

    calibration: Calibration
    folder: Path
    seconds: float
    states: tuple[torch.Tensor, torch.Tensor]
    reports: list[tuple[str, float]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """Measured once: it takes seconds."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("calibrated")
    reports: list[tuple[str, float]] = []
    before, started = torch.get_rng_state(), time.perf_counter()
    found = calibrate(HERE, Settings(cache_dir=str(folder)), lambda what, done: reports.append((what, done)))
    yield Measured(found, folder, time.perf_counter() - started, (before, torch.get_rng_state()), reports)


def test_calibrating_is_quick_reports_and_leaves_the_random_state(measured: Measured) -> None:
    assert measured.seconds < 30, "20 s on a quiet machine"
    fractions = [done for _, done in measured.reports]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert torch.equal(*measured.states)
    assert torch.is_grad_enabled()


def test_every_figure_is_finite_and_every_rate_positive(measured: Measured) -> None:
    device = measured.calibration.device
    rates = [device.contraction_flops, device.attention_flops, device.convolution_flops, device.pointwise_per_second]
    numbers = [rate for table in rates for _, rate in table]
    numbers += [value for value in vars(device).values() if isinstance(value, int | float)]
    assert all(math.isfinite(number) for number in numbers)
    assert all(rate > 0 for table in rates for _, rate in table) and all(rates)
    for name in ("bytes", "reduction_bytes", "gather_bytes", "cached_bytes", "simple", "transcendental"):
        assert getattr(device, f"{name}_per_second") > 1e6
    assert 0 < device.launch_seconds < 1e-3 and 0 < device.extern_seconds < 1e-3
    assert device.cache_bytes >= 256 * 1024
    names = {name for name, _ in device.pointwise_per_second}
    names |= {note.split(":")[0] for note in measured.calibration.notes}
    assert names >= {"tanh", "exp", "erf", "sigmoid", "log", "sin", "sqrt", "rsqrt", "div", "pow", "inductor_random"}


def test_what_was_measured_is_what_is_loaded(measured: Measured) -> None:
    settings = Settings(cache_dir=str(measured.folder))
    found = snapshot.load(HERE, settings)
    assert found == measured.calibration.snapshot
    assert (found.device, found.origin) == (measured.calibration.device, "calibrated")
    document = json.loads(measured.calibration.path.read_text())
    assert {"date", "seconds", "device", "torch", "threads"} <= set(document)
    taught = snapshot.load(HERE, dataclasses.replace(settings, cost="learned"))
    assert taught.learned is not None and measured.calibration.learned is not None
    assert taught.learned.to_dict() == measured.calibration.learned.to_dict()
    assert taught.hash != found.hash
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_compilation_runs_on_measured_figures(measured: Measured) -> None:
    for cost in ("roofline", "learned"):
        before = sorted(measured.folder.iterdir())
        summary = compile_small(measured.folder, cost=cost)
        assert summary.origin != "fallback", cost
        assert sorted(measured.folder.iterdir()) == before


def test_the_command_prints_both_columns_where_it_is_kept_and_the_hash(
    measured: Measured, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    asked: list[bool] = []

    def instead(device: torch.device, settings: Settings, progress: Any, refresh: bool) -> Calibration:
        asked.append(refresh)
        progress("something", 0.5)
        return measured.calibration

    monkeypatch.setattr(cli, "calibrate", instead)
    assert cli.main(["calibrate", "--device", "cpu", "--cache-dir", str(measured.folder), "--refresh"]) == 0
    printed = capsys.readouterr().out
    assert asked == [True]
    assert all(part in printed for part in ("measured", "built in", "bytes_per_second", "pointwise_per_second: tanh"))
    assert str(measured.calibration.path) in printed
    assert measured.calibration.snapshot.hash in printed
    assert "matmul: learned prices are off by" in printed

    assert cli.main(["figures", "--device", "cpu", "--cache-dir", str(measured.folder)]) == 0
    assert f"calibrated, hash {measured.calibration.snapshot.hash}" in capsys.readouterr().out
    assert cli.main(["figures", "--device", "cpu", "--cache-dir", str(tmp_path)]) == 0
    assert "built in, hash" in capsys.readouterr().out


def test_a_device_that_is_not_here_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--device", "meta"]) == 1
    assert "meta cannot be measured here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["calibrate", "--device", "toaster"])
