"""Result files: a JSON list of rows of one schema, written a row at a time so that a run can be resumed."""

import dataclasses
import fcntl
import hashlib
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
MIB = 2**20
LAST_STEPS = 10
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Row:
    """One measured variant of one model. Sizes in bytes, times in seconds; None where it was not measured.

    `step_ratio` is this variant's step time over that of the peer named in `extra["peer"]`, with its 95%
    interval; `compile_seconds` is the wall time of the first forward and backward; `gradient_error` is
    relative to a float64 eager run.
    """

    model: str
    variant: str
    options: dict[str, Any]
    schema: int
    command: str
    git: str
    torch: str
    device: str
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    recomputed_flops: int | None = None
    recomputed_bytes: int | None = None
    forward_flops: int | None = None
    step_ratio: float | None = None
    step_ratio_ci: tuple[float, float] | None = None
    decision_seconds: float | None = None
    compile_seconds: float | None = None
    gradient_error: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes two rows of a file the same measurement."""
        return row_key(self.model, self.variant, self.options)


def listed(text: str) -> list[str]:
    """The parts of a comma-separated argument."""
    return [part.strip() for part in text.split(",") if part.strip()]


def row_key(model: str, variant: str, options: dict[str, Any]) -> tuple[str, str, str]:
    """See `Row.key`."""
    return model, variant, json.dumps(options, sort_keys=True)


def provenance(module: str, device: str) -> dict[str, Any]:
    """The fields that say where a row comes from, for the script run as `python -m <module>`."""
    return {
        "schema": SCHEMA,
        "command": shlex.join(["python", "-m", module, *_what_was_asked(sys.argv[1:])]),
        "git": _git_revision(),
        "torch": torch.__version__,
        "device": device_name(device),
    }


def _what_was_asked(arguments: list[str]) -> list[str]:
    """The arguments without where the output went, which is a matter of the machine, and without `--row`."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument not in ("--row", "--json", "--out") and not argument.startswith(("--json=", "--out=")):
            kept.append(argument)
        skip = argument in ("--json", "--out")
    return kept


def read_rows(path: Path) -> list[Row]:
    """The rows of a result file; none if it does not exist or was written under another schema."""
    if not path.exists():
        return []
    return [Row(**row) for row in json.loads(path.read_text()) if row["schema"] == SCHEMA]


def write_row(path: Path, row: Row) -> None:
    """Add `row` to the file, in the place of an earlier row with the same key, after other processes doing so."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"remat-results-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = read_rows(path)
        keys = [known.key for known in rows]
        if row.key in keys:
            rows[keys.index(row.key)] = row
        else:
            rows.append(row)
        write_rows(path, rows)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace the file as a whole; an interrupted write leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n")
    partial.replace(path)


def source_hash(patterns: Iterable[str]) -> str:
    """A hash of the repository's files that match `patterns`: rows of other sources are stale."""
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def final_loss(curve: Sequence[float]) -> float:
    """What a training came to: the mean loss of its last `LAST_STEPS` steps."""
    last = curve[-LAST_STEPS:]
    return sum(last) / len(last)


def _git_revision() -> str:
    """The commit, with "-dirty" where tracked files differ from it; "unknown" outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's architecture and the threads that torch uses of it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {platform.machine()}, {torch.get_num_threads()} thread(s)"
