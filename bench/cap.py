"""Budgets proved by force: training under an allocator that refuses what exceeds the cap.

    python -m bench.cap --inner eager
    python -m bench.cap --inner inductor --models gpt2:layers=2:vocabulary=512:sequence=128

The cap of a model is 2% above the smallest peak that remat has a plan for: op by op the smallest peak it names, under
Inductor the smallest budget that it keeps by its exact peak (a dry run). remat, asked for the cap or that budget, then
trains for `--steps` optimizer steps (AdamW, clipping, two accumulated micro-batches) under it. Compared are the same
training without the cap, remat's default plan, whose gradients are those of the joint graph, and eager mode, unless
random numbers are drawn, which it takes elsewhere; and, to tell what rounding does to these losses, eager mode from
weights moved by 1e-7 with eager mode. Eager mode and PyTorch's partitioner at each of its budgets train
under the same cap until they run out of memory, if they do.

Each row in a process of its own, written as it comes; rows measured with the same sources are not measured again.
"""

import argparse
import copy
import dataclasses
import gc
import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

import remat
from bench import cap_tables, memory, results
from bench.budget import TOLERANCE
from bench.cap_tables import CAP, DEFAULT_PLAN, EAGER, OURS, PEERS, UNCAPPED
from bench.cap_training import Trainer, Training, micro_batches
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

MODELS = (
    "gpt2:layers=2:vocabulary=512:sequence=128,bert:layers=2:width=128:vocabulary=512:batch=4,"
    "resnet:width=16,unet:levels=2:width=16:batch=4"
)
# For what no plan knows of: the scalars around the graph, such as the loss divided by the number of micro-batches.
SLACK = 1.02
# Under Inductor budgets are tried in growing steps, and given up at so many times the smallest plan's exact peak.
STEP, GIVE_UP = 1.04, 2.0
SEED = 1
# What one rounding in float32 may change of a weight, as a share of it.
ROUNDING = 1e-7
SOURCES = (
    *(f"bench/{name}" for name in ("models.py", "custom_models.py", "gradients.py")),
    *(f"bench/{name}" for name in ("memory.py", "native.py", "allocator.cpp", "cap.py", "cap_training.py")),
    "remat/*.py",
    "passes/*.py",
)


@dataclass(frozen=True)
class Job:
    """What the rows of one model have in common."""

    model: str
    inner: str
    steps: int
    device: str
    json: Path

    def rows(self) -> list[results.Row]:
        """This model's rows that are in the file, run by this executor."""
        found = results.read_rows(self.json)
        return [row for row in found if row.model == self.model and row.extra["inner"] == self.inner]

    def cap_bytes(self) -> int:
        """The cap, once it has been found."""
        (cap,) = [row.budget_bytes for row in self.rows() if row.variant == CAP]
        assert cap is not None
        return cap

    def _asked_bytes(self) -> int:
        """The budget that remat is asked for: under Inductor what it says it can hold, else the cap."""
        (cap,) = [row for row in self.rows() if row.variant == CAP]
        asked: int = cap.extra.get("asked_bytes", self.cap_bytes())
        return asked

    def built(self) -> Workload:
        """The model and its arguments, anew."""
        name, overrides = parse_spec(self.model)
        return build(name, device=self.device, **overrides)

    def variant(self, name: str) -> Variant:
        """How to compile the variant of this name; remat's is asked for the cap."""
        if name == OURS:
            return remat_variant(self.inner, str(self._asked_bytes()), OURS)
        return parse_variant(name, self.inner)


def main() -> int:
    arguments = _parse_arguments()
    use_one_thread()
    fixed = (arguments.inner, arguments.steps, arguments.device, arguments.json)
    jobs = [Job(model, *fixed) for model in arguments.models]
    if arguments.row:
        results.write_row(arguments.json, measure_row(jobs[0], arguments.row))
        return 0
    variants = results.listed(arguments.variants) if arguments.variants else (OURS, *PEERS)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        done = list(pool.map(lambda job: _measure_model(job, variants), jobs))
    rows = results.read_rows(arguments.json)
    for cells in (cap_tables.cells, cap_tables.peer_cells):
        print("\n".join(" | ".join(line) for line in cells(rows)), end="\n\n")
    return 0 if all(done) else 1


def _measure_model(job: Job, variants: Sequence[str]) -> bool:
    """Measure what is missing of one model, the cap first; whether every row came about."""
    if not _ensure(job, CAP):
        return False
    done = [_ensure(job, name) for name in variants]
    return all(done)


def _ensure(job: Job, variant: str) -> bool:
    """Measure a row in a fresh process, unless the file has a current one."""
    cap = None if variant == CAP else job.cap_bytes()
    for row in job.rows():
        if row.variant == variant and cap in (None, row.budget_bytes) and _is_current(row, job):
            return True
    print(f"measuring {job.model} {variant}, run by {job.inner}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "bench.cap", "--row", variant, "--models", job.model]
    for flag in ("inner", "steps", "device", "json"):
        command += [f"--{flag}", str(getattr(job, flag))]
    return subprocess.run(command).returncode == 0


def _is_current(row: results.Row, job: Job) -> bool:
    same_place = (row.torch, row.device) == (torch.__version__, results.device_name(job.device))
    return same_place and row.extra["sources"] == _sources() and row.extra.get("steps_asked", job.steps) == job.steps


def _sources() -> str:
    return results.source_hash(SOURCES)


# --- one row -------------------------------------------------------------------------------------------------------


def measure_row(job: Job, variant: str) -> results.Row:
    """Measure one row in this process."""
    disable_compile_caches()
    inductor_config.compile_threads = 1
    memory.install(job.device)
    if variant == CAP:
        return _row(job, CAP, {}, **_measure_cap(job))
    return _measure_training(job, job.variant(variant))


def _row(job: Job, variant: str, options: dict[str, Any], *, extra: dict[str, Any], **fields: Any) -> results.Row:
    return results.Row(
        model=job.model,
        variant=variant,
        # Eager mode has no options, and rows of both executors have to be told apart.
        options={"inner": job.inner} | options,
        **results.provenance("bench.cap", job.device),
        **fields,
        extra=extra | {"inner": job.inner, "sources": _sources()},
    )


def _measure_cap(job: Job) -> dict[str, Any]:
    """The fields of the row that holds the cap: 2% above the smallest peak that remat says it can hold."""
    workload = job.built()
    if job.inner == "inductor":
        return _smallest_exact(workload)
    training_step(remat_variant("eager", "min").compile(workload.model), workload.args, workload.model.parameters())
    summaries = summaries_since(0)
    smallest = max(summary.smallest_peak_bytes for summary in summaries)
    extra = {"note": workload.note} | budget_extra(summaries)
    return {"budget_bytes": int(smallest * SLACK), "predicted_peak_bytes": smallest, "extra": extra}


def _smallest_exact(workload: Workload) -> dict[str, Any]:
    """The exact peak of the smallest plan, grown until remat holds it as a budget in bytes."""
    smallest = _dry_run(workload, "min").dry_run.peak_bytes
    budget, tried = smallest, []
    while budget < GIVE_UP * smallest:
        try:
            exact = _dry_run(workload, budget).dry_run.peak_bytes
        except remat.BudgetUnreachable:
            exact = None
        tried.append((budget, exact))
        if exact is not None:
            extra = {"note": workload.note, "tried": tried, "asked_bytes": budget}
            return {"budget_bytes": int(budget * SLACK), "predicted_peak_bytes": exact, "extra": extra}
        budget = int(budget * STEP)
    raise RuntimeError(f"no budget below {budget:,} bytes holds in a dry run; (budget, exact peak): {tried}")


def _dry_run(workload: Workload, budget: int | str) -> Any:
    return remat.dry_run(workload.model, *workload.args, options={"budget": budget, "strict": True})


def _measure_training(job: Job, variant: Variant) -> results.Row:
    """Compile, measure a step without a cap, judge the gradients, train under the cap."""
    cap, workload = job.cap_bytes(), job.built()
    start_state = copy.deepcopy(workload.model.state_dict())
    call, parameters = variant.compile(workload.model), list(workload.model.parameters())
    started = time.perf_counter()
    training_step(call, workload.args, parameters)
    compile_seconds = time.perf_counter() - started if variant.backend else None
    summaries = summaries_since(0) if variant.is_remat else ()
    error = _error_of_gradients(job, call, workload)
    batches = micro_batches(job.model, job.device)
    trainer = Trainer(workload.model, start_state, batches, job.steps, SEED, job.device)
    peak = memory.step_memory(lambda: call(*workload.args), parameters, job.device).peak_bytes
    # Capping collects garbage, which is quick without the objects that importing and compiling left.
    gc.collect()
    gc.freeze()
    capped = trainer.train(call, cap)
    extra = _told(capped) | {"steps_asked": job.steps, "note": workload.note, "right": error < TOLERANCE}
    if variant.name == OURS and capped.refusal is None:
        extra["compared"] = _compared(trainer, capped, {UNCAPPED: call, DEFAULT_PLAN: _default_plan(job, workload)})
        if not workload.has_dropout:
            extra["compared"] |= _compared(trainer, capped, {EAGER: workload.model})
            extra["rounding"] = _rounding(trainer, workload.model)
    return _row(
        job,
        variant.name,
        variant.options,
        **plan_fields(summaries),
        budget_bytes=cap,
        peak_bytes=peak,
        compile_seconds=compile_seconds,
        gradient_error=error,
        extra=plan_extra(summaries) | extra,
    )


def _told(training: Training) -> dict[str, Any]:
    """What a row keeps of the training under the cap."""
    return {
        "steps": len(training.losses),
        "capped_peak_bytes": training.peak_bytes,
        "losses": training.losses,
        "refusal": dataclasses.asdict(training.refusal) if training.refusal else None,
    }


def _compared(trainer: Trainer, capped: Training, others: Mapping[str, LossFunction]) -> dict[str, Any]:
    """How the training under the cap differs from each of the others, which have none."""
    found = {}
    for name, other in others.items():
        # Compiles, if it has to, before the training, in which that is an error.
        training_step(other, trainer.batches[0], trainer.module.parameters())
        truth = trainer.train(other, None)
        found[name] = {"equal": capped.equals(truth), "distance": capped.distance(truth)}
    return found


def _rounding(trainer: Trainer, call: LossFunction) -> float:
    """How far two trainings get from each other whose weights at the start differ by a rounding error."""
    torch.manual_seed(SEED)
    moved = {
        name: value * (1 + ROUNDING * torch.randn_like(value)) if value.is_floating_point() else value
        for name, value in trainer.start.items()
    }
    return trainer.train(call, None).distance(dataclasses.replace(trainer, start=moved).train(call, None))


def _default_plan(job: Job, workload: Workload) -> LossFunction:
    return remat_variant(job.inner, None).compile(workload.model)


def _error_of_gradients(job: Job, call: LossFunction, workload: Workload) -> float:
    """How far the gradients are from eager mode's, or from the default plan's where random numbers are drawn."""
    found = _seeded_gradients(call, workload)
    name = hashlib.sha256(f"{_sources()} {job.model} {job.inner}".encode()).hexdigest()[:16]
    # Compiling the default plan takes long, and every row of the model needs its gradients.
    file = Path(tempfile.gettempdir()) / f"remat-cap-{name}.pt"
    if file.exists():
        return gradient_error(found, torch.load(file))
    again = job.built()
    truth = _seeded_gradients(_default_plan(job, again) if again.has_dropout else again.model, again)
    partial = file.with_suffix(".partial")
    torch.save(truth, partial)
    partial.replace(file)
    return gradient_error(found, truth)


def _seeded_gradients(call: LossFunction, workload: Workload) -> list[Tensor]:
    torch.manual_seed(SEED)
    return gradients(call, workload.args, list(workload.model.parameters()))


def _parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cap", description=__doc__.split("\n", 1)[0])
    known = f"model[:key=value...], comma-separated; models: {', '.join(BUILDERS)}"
    parser.add_argument("--models", type=results.listed, default=results.listed(MODELS), help=known)
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--variants", help=f"comma-separated, of {OURS}, {', '.join(PEERS)}; all")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--jobs", type=int, default=1, help="models measured at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=results.RESULTS / "cap.json")
    parser.add_argument("--row", help="measure this one row of the first model named, in this process")
    arguments = parser.parse_args(given)
    try:
        for spec in arguments.models:
            parse_spec(spec)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(results.listed(arguments.variants or "")) - {OURS, *PEERS}:
        parser.error(f"no variant {', '.join(sorted(unknown))}; known: {OURS}, {', '.join(PEERS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
