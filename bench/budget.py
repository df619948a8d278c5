"""Budgets op by op: PyTorch's partitioner at its budgets against remat asked for the same peaks, in bytes.

    python -m bench.budget --part peaks --models gpt2:layers=12,vit:layers=6
    python -m bench.budget --part monotone,chains

Three parts. `peaks`: the second step's measured peak under PyTorch's partitioner at each of its budgets, under remat
at each of those peaks, at "min", and at 0.6 of PyTorch's smallest peak. `monotone`: thirty budgets between "min" and
the default plan's peak, every distinct plan run on real tensors. `chains`: the smallest peak of chains of equal layers
with at most one forward more. Each row in a process of its own, written as it comes; rows that were measured with the
same sources are not measured again.

Gradients are judged by two references: eager mode, and remat's default plan run with the same random stream, whose
gradients are those of the joint graph to the last bit.
"""

import argparse
import copy
import dataclasses
import fcntl
import gc
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

import remat
from bench import budget_tables, memory, results
from bench.budget_tables import CHAIN_LAYERS, MONOTONE_BUDGETS, SMALLER, TORCH_BUDGETS
from bench.gradients import gradient_error, gradients
from bench.models import BUILDERS, Workload, build, parse_spec
from bench.timing import training_step, use_one_thread
from bench.variants import (
    LossFunction,
    Variant,
    budget_extra,
    disable_compile_caches,
    parse_variant,
    plan_extra,
    plan_fields,
    remat_variant,
    summaries_since,
)
from remat import passes
from remat.budgets import PeakPlanner
from remat.costs import FEMTOSECONDS
from remat.eager import OpByOp
from remat.joint import JointGraph
from remat.plan import Plan
from remat.plans import Planner
from remat.settings import Settings
from tests import checks, graphs

MODELS = (
    "vit:layers=6,dlrm,convnext,bert:layers=4,chain,mamba,unet,t5,rnn,resnet50,"
    "llama:layers=12,gpt2:layers=12,mlp:layers=100:kaiming=true"
)
PARTS = ("peaks", "monotone", "chains")
DEFAULT, MIN = "remat", "remat-min"
# What a measurement depends on.
SOURCES = (
    *(f"bench/{name}.py" for name in ("models", "custom_models", "memory", "gradients")),
    "remat/*.py",
    "passes/*.py",
)
# Gradients of float32 further than this from eager mode's are wrong, or the model is ill-conditioned: then float64
# decides.
TOLERANCE = 1e-3
STEP_SEED = 1
OP_BY_OP = Settings(inner="eager", strict=True)


def main() -> int:
    arguments = _parse_arguments()
    use_one_thread()
    if arguments.row:
        _write(arguments.json, measure_row(arguments.models[0], arguments.row))
        return 0
    work = [("chains", f"chain:layers={n}") for n in CHAIN_LAYERS] if "chains" in arguments.part else []
    work += [(part, model) for model in arguments.models for part in arguments.part if part != "chains"]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        done = list(pool.map(lambda job: _measure_model(arguments.json, *job), work))
    rows = results.read_rows(arguments.json)
    for name in budget_tables.TABLES:
        print(f"{budget_tables.markdown(name, rows)}\n")
    print("\n".join(budget_tables.violations(rows)))
    return 0 if all(done) else 1


# --- which rows ----------------------------------------------------------------------------------------------------


def _measure_model(file: Path, part: str, model: str) -> bool:
    """Measure what is missing of one part of one model; whether every row came about."""
    if part != "peaks":
        return _ensure(file, model, part)
    torch_variants = [f"inductor-{fraction}" for fraction in TORCH_BUDGETS]
    if not all([_ensure(file, model, variant) for variant in (DEFAULT, *torch_variants, MIN)]):
        return False
    rows = {row.variant: row for row in results.read_rows(file) if row.model == model}
    peers = [row for name in torch_variants if (row := rows[name]).peak_bytes is not None]
    budgets = sorted({row.peak_bytes for row in peers if row.peak_bytes}, reverse=True)
    correct = [row.peak_bytes for row in peers if row.peak_bytes and row.extra["correct"]]
    done = [_ensure(file, model, f"remat-{budget}") for budget in budgets]
    if correct and rows[MIN].peak_bytes is not None:
        smaller, bound = int(SMALLER * min(correct)), rows[MIN].extra["peak_bound_bytes"]
        if smaller >= bound:
            done.append(_ensure(file, model, f"remat-{smaller}"))
        else:
            reason = f"no plan has a peak below {bound:,} bytes"
            _write(file, _row(model, f"remat-{smaller}", budget_bytes=smaller, extra={"skipped": reason}))
    return all(done)


def _ensure(file: Path, model: str, variant: str) -> bool:
    """Measure a row in a fresh process, unless the file has a current one."""
    key = results.row_key(model, variant, _options(variant))
    known = {row.key: row for row in results.read_rows(file)}.get(key)
    if known is not None and known.torch == torch.__version__ and known.extra["sources"] == _sources():
        return True
    print(f"measuring {model} {variant}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "bench.budget", "--row", variant, "--models", model, "--json", str(file)]
    return subprocess.run(command).returncode == 0


def _sources() -> str:
    return results.source_hash(SOURCES)


def _options(variant: str) -> dict[str, Any]:
    return {} if variant in PARTS else parse_variant(variant, "eager").options


def _row(model: str, variant: str, *, extra: dict[str, Any], **fields: Any) -> results.Row:
    return results.Row(
        model=model,
        variant=variant,
        options=_options(variant),
        **results.provenance("bench.budget", "cpu"),
        **fields,
        extra=extra | {"inner": "eager", "sources": _sources()},
    )


def _write(file: Path, row: results.Row) -> None:
    """Write a row; other processes may do so at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with _alone(file.with_suffix(".lock")):
        results.write_row(file, row)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    lock.unlink(missing_ok=True)


def measure_row(model: str, variant: str) -> results.Row:
    """Measure one row in this process."""
    disable_compile_caches()
    inductor_config.compile_threads = 1
    memory.install()
    name, overrides = parse_spec(model)
    workload = build(name, **overrides)
    if variant == "monotone":
        return _row(model, variant, **measure_monotone(workload))
    if variant == "chains":
        return _row(model, variant, **measure_chain(workload, overrides["layers"]))
    return _measure_peak(model, workload, parse_variant(variant, "eager"))


# --- peaks ---------------------------------------------------------------------------------------------------------


def _measure_peak(model: str, workload: Workload, variant: Variant) -> results.Row:
    call, parameters = variant.compile(workload.model), list(workload.model.parameters())
    start = time.perf_counter()
    try:
        training_step(call, workload.args, parameters)
    except Exception as error:  # noqa: BLE001 - a budget that cannot be met is a result
        reason = getattr(error, "inner_exception", error)
        return _row(model, variant.name, extra={"failed": f"{type(reason).__name__}: {reason}"})
    compile_seconds = time.perf_counter() - start
    summaries = summaries_since(0)
    step = memory.step_memory(lambda: call(*workload.args), parameters)
    verdict = _judge(model, workload, variant, call)
    return _row(
        model,
        variant.name,
        **plan_fields(summaries),
        budget_bytes=summaries[0].budget_bytes or None,
        peak_bytes=step.peak_bytes,
        saved_bytes=step.saved_bytes,
        compile_seconds=compile_seconds,
        gradient_error=verdict.gradient_error,
        extra=plan_extra(summaries)
        | budget_extra(summaries)
        | {"note": workload.note, "correct": verdict.correct, "joint_error": verdict.joint_error}
        | {"checked_in": verdict.checked_in},
    )


@dataclass(frozen=True)
class Verdict:
    """Whether gradients are right: how far from eager mode's (None with dropout) and from the joint graph's."""

    gradient_error: float | None
    joint_error: float
    checked_in: str

    @property
    def correct(self) -> bool:
        if self.gradient_error is None:
            return self.joint_error == 0
        return self.gradient_error < TOLERANCE


@dataclass(frozen=True)
class Reference:
    """The default plan's gradients, and how far from eager mode's."""

    gradients: list[Tensor]
    gradient_error: float | None
    checked_in: str


def _judge(model: str, workload: Workload, variant: Variant, call: LossFunction) -> Verdict:
    found = _seeded_gradients(call, workload)
    if variant.name == DEFAULT:
        reference = _make_reference(model, workload, found)
    else:
        reference = _reference(model)
    joint_error = gradient_error(found, reference.gradients)
    if joint_error == 0:
        return Verdict(reference.gradient_error, joint_error, reference.checked_in)
    return Verdict(*_error_to_eager(workload, variant, found), joint_error=joint_error)._reordered()


def _seeded_gradients(call: LossFunction, workload: Workload) -> list[Tensor]:
    torch.manual_seed(STEP_SEED)
    return gradients(call, workload.args, list(workload.model.parameters()))
