"""One call of the backend: what its parts tell each other, and the summaries that outlive the compile cache.

The partitioner object lives inside Inductor's config, which is copied, compared and pickled; it can hold nothing.
So the state of a compilation hangs on a context variable.

On a warm cache neither the joint graph nor the partitioner comes to life. What the user should see every time is
therefore written beside Inductor's cache under the hash of the Dynamo graph, and read back.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from remat import report, torch_internals
from remat.errors import RematWarning
from remat.report import PlanSummary
from remat.settings import Settings
from remat.snapshot import Snapshot

_CURRENT: ContextVar[Session | None] = ContextVar("remat_session", default=None)
_SUMMARIES: list[PlanSummary] = []


@dataclass
class Session:
    """The compilation of one Dynamo graph. `joint` is kept for `check` only.

    is_trial: it only serves to time a plan (tune.py), and the user hears nothing of it.
    """

    graph: str
    settings: Settings
    snapshot: Snapshot
    summaries: list[PlanSummary] = field(default_factory=list)
    joint: fx.GraphModule | None = None
    num_fwd_outputs: int = 0
    is_trial: bool = False


def current() -> Session | None:
    """The compilation under way on this thread, if the backend started it."""
    return _CURRENT.get()


def summaries() -> tuple[PlanSummary, ...]:
    """One summary for each joint graph compiled in this process, in order."""
    return tuple(_SUMMARIES)


def record(summary: PlanSummary) -> None:
    """Note a summary and show it; a fallback also warns, from a warm cache too. Not one of a trial."""
    session = current()
    if session is not None and session.is_trial:
        return
    _SUMMARIES.append(summary)
    if summary.origin == "fallback":
        warnings.warn(
            f"remat could not plan graph {summary.graph}, PyTorch's partitioner did ({summary.reason})",
            RematWarning,
            stacklevel=2,
        )
    if session is not None:
        session.summaries.append(summary)
        report.show(summary, session.settings.log)


@contextmanager
def compiling(graph: str, settings: Settings, snapshot: Snapshot, is_trial: bool = False) -> Iterator[Session]:
    """Open a session; the partitioner finds it by `current()`."""
    session = Session(graph, settings, snapshot, is_trial=is_trial)
    token = _CURRENT.set(session)
    try:
        yield session
    finally:
        _CURRENT.reset(token)


# --- summaries on disk --------------------------------------------------------------------------------------


def remember(session: Session) -> None:
    """Write a compilation's summaries, whole or not at all."""
    path = _path(session.graph)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(report.to_json(session.summaries))
    os.replace(file.name, path)


def recall(session: Session) -> list[PlanSummary]:
    """The summaries of an earlier compilation of this very graph; none if there are none."""
    path = _path(session.graph)
    if not path.exists():
        return []
    return report.from_json(path.read_text())


def _path(graph: str) -> Path:
    return Path(torch_internals.default_cache_folder()) / f"{graph}.json"


# --- hashes ---------------------------------------------------------------------------------------------------


@cache
def source_hash() -> str:
    """Hash of every source file of remat and its passes: a changed file must never meet an old cache entry."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent
    for folder in (root, root / "passes"):
        for path in sorted(folder.glob("*.py")):
            digest.update(f"{folder.name}/{path.name}".encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def graph_hash(module: fx.GraphModule, example_inputs: Sequence[Any], key: object) -> str:
    """Hash of a Dynamo graph, its inputs' metadata, the state that AOTAutograd traces under, and `key`."""
    digest = hashlib.sha256(source_hash().encode())
    for name, part in module.named_modules():
        if isinstance(part, fx.GraphModule):
            digest.update(f"{name}:{part.graph}\n".encode())
    for value in example_inputs:
        digest.update(_described(value).encode() + b"\n")
    digest.update(torch_internals.current_grad_and_autocast().encode())
    digest.update(repr((torch.__version__, key)).encode())
    return digest.hexdigest()[:16]


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__}"
    return (
        f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.stride()} {value.device} "
        f"{value.requires_grad} {value.is_leaf}"
    )
