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
import hashlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx

from bench import budget_tables, memory, results
from bench.budget_tables import CHAIN_LAYERS, MONOTONE_BUDGETS, TORCH_BUDGETS
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
from remat import partitioner, passes
from remat.budgets import PeakPlanner
from remat.costs import FEMTOSECONDS
from remat.eager import OpByOp
from remat.partitioner import Decision
from remat.plan import Plan
from remat.plans import Planner

MODELS = (
    "vit:layers=6,dlrm,convnext,bert:layers=4,chain,mamba,unet,t5,rnn,resnet50,"
    "llama:layers=12,gpt2:layers=12,mlp:layers=40,mlp:layers=100:kaiming=true"
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


def main() -> int:
    arguments = _parse_arguments()
    use_one_thread()
    if arguments.row:
        results.write_row(arguments.json, measure_row(arguments.models[0], arguments.row))
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
    if not all(_ensure(file, model, variant) for variant in (DEFAULT, *torch_variants, MIN)):
        return False
    (peaks,) = budget_tables.peaks_of([row for row in results.read_rows(file) if row.model == model])
    budgets = sorted({row.peak_bytes for row in peaks.torch if row.peak_bytes is not None}, reverse=True)
    done = [_ensure(file, model, f"remat-{budget}") for budget in budgets]
    if peaks.smaller_budget and peaks.smallest is not None:
        smaller, bound = peaks.smaller_budget, peaks.smallest.extra["peak_bound_bytes"]
        if smaller >= bound:
            done.append(_ensure(file, model, f"remat-{smaller}"))
        else:
            reason = f"no plan has a peak below {bound:,} bytes"
            results.write_row(file, _row(model, f"remat-{smaller}", budget_bytes=smaller, extra={"skipped": reason}))
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


def _temporary(what: str, suffix: str) -> Path:
    """A file that all processes of these sources share."""
    name = hashlib.sha256(f"{_sources()} {what}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"remat-budget-{name}.{suffix}"


def measure_row(model: str, variant: str) -> results.Row:
    """Measure one row in this process."""
    disable_compile_caches()
    inductor_config.compile_threads = 1
    memory.install()
    workload = _built(model)
    if variant == "monotone":
        return _row(model, variant, **measure_monotone(workload))
    if variant == "chains":
        return _row(model, variant, **measure_chain(workload, parse_spec(model)[1]["layers"]))
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
    """How far gradients are from eager mode's (None with dropout, which draws others) and from the joint graph's.

    checked_in: the dtype in which they were compared with eager mode's.
    """

    gradient_error: float | None
    checked_in: str
    joint_error: float = 0.0

    @property
    def correct(self) -> bool:
        return self.joint_error == 0 if self.gradient_error is None else self.gradient_error < TOLERANCE


def _judge(model: str, workload: Workload, variant: Variant, call: LossFunction) -> Verdict:
    """Equal to the joint graph's gradients, gradients are as good as those; else they are compared by themselves."""
    found = _seeded_gradients(call, workload)
    file = _temporary(model, "pt")
    if variant.name == DEFAULT:
        verdict = _compared_with_eager(workload, variant, found)
        torch.save((found, verdict), file)
        return verdict
    if not file.exists():
        default, again = parse_variant(DEFAULT, "eager"), _built(model)
        joint = _seeded_gradients(default.compile(again.model), again)
        torch.save((joint, _compared_with_eager(again, default, joint)), file)
    joint, verdict = torch.load(file, weights_only=False)
    joint_error = gradient_error(found, joint)
    if joint_error == 0:
        return verdict
    return dataclasses.replace(_compared_with_eager(workload, variant, found), joint_error=joint_error)


def _seeded_gradients(call: LossFunction, workload: Workload) -> list[Tensor]:
    torch.manual_seed(STEP_SEED)
    return gradients(call, workload.args, list(workload.model.parameters()))


def _compared_with_eager(workload: Workload, variant: Variant, found: list[Tensor]) -> Verdict:
    """In float32; where that is too coarse for the model, the same variant of it is compared in float64."""
    if workload.has_dropout:
        return Verdict(None, "float32")
    error = gradient_error(found, _seeded_gradients(workload.model, workload))
    if error < TOLERANCE:
        return Verdict(error, "float32")
    arguments = tuple(a.double() if a.is_floating_point() else a for a in workload.args)
    exact = Workload(copy.deepcopy(workload.model).double(), arguments, workload.note)
    budget = variant.options.get("budget")
    if isinstance(budget, str) and budget.isdigit():
        variant = remat_variant("eager", str(2 * int(budget)))
    found = _seeded_gradients(variant.compile(exact.model), exact)
    return Verdict(gradient_error(found, _seeded_gradients(exact.model, exact)), "float64")


# --- monotone, chains ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Planned:
    """The plans of one model, made from its joint graph once."""

    planner: Planner
    peaks: PeakPlanner
    default: Plan
    nodes: int
    seconds: float

    @classmethod
    def of(cls, workload: Workload) -> "Planned":
        """As `Planner.within` does, for any number of budgets."""
        decision = _decision(workload)
        planner, default = decision.planner, decision.chosen.plan
        start = time.thread_time()
        seeds = [default, planner._obeying_the_rules(planner.torch_default()).plan]
        peaks = PeakPlanner(
            planner.joint, planner.costs, planner.rules, planner.settings, planner.scratch, seeds, planner.estimate_of
        )
        with partitioner.no_collection():
            assert peaks.frontier.points
        seconds = decision.summary.decision_seconds + time.thread_time() - start
        return cls(planner, peaks, default, decision.summary.nodes, seconds)

    def cost(self, plan: Plan) -> int:
        """Recomputation in predicted femtoseconds."""
        return self.peaks.step.problem.recompute_cost(self.peaks.step.sequence_of(plan))

    def flops(self, plan: Plan) -> int:
        """FLOPs that run again."""
        return sum(self.planner.costs.flops.get(node, 0) for node in plan.recomputed)

    def measured_peak(self, plan: Plan) -> int:
        """The peak of forward and backward on real tensors, run as AOTAutograd does: saved values are given away."""
        joint, partition = self.planner.joint, passes.rewrite(plan, self.planner.rules)
        forward, backward = OpByOp(partition.forward), OpByOp(partition.backward)
        backwards = joint.tangent_closure
        inputs = [_example(node) for node in joint.nodes if node.op == "placeholder" and node not in backwards]
        tangents = [_example(node) for node in joint.tangents]

        def step() -> Any:
            found = list(forward(list(inputs)))
            outputs, saved = found[: joint.num_fwd_outputs], found[joint.num_fwd_outputs :]
            found.clear()
            tensors = len(saved) - partition.num_sizes
            arguments = [*saved[tensors:], *saved[:tensors], *(tangent.clone() for tangent in tangents)]
            saved.clear()
            return outputs, backward(arguments)

        with torch.no_grad():
            return memory.measure(step).peak_bytes


def _decision(workload: Workload) -> Decision:
    """What remat decides by default about the only graph of a step."""
    decisions: list[Decision] = []
    original = partitioner.decide

    def decide(*arguments: Any) -> Decision:
        decisions.append(original(*arguments))
        return decisions[-1]

    with mock.patch.object(partitioner, "decide", decide):
        call = parse_variant(DEFAULT, "eager").compile(workload.model)
        training_step(call, workload.args, list(workload.model.parameters()))
    (decision,) = decisions
    return decision


def _example(node: fx.Node) -> Any:
    """A value for a placeholder; zeros where it may be an index."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return value
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return result.normal_() if value.dtype.is_floating_point else result.zero_()


def measure_monotone(workload: Workload) -> dict[str, Any]:
    """Thirty budgets from the default plan's peak down to that of "min": the fields of a row."""
    planned = Planned.of(workload)
    peaks = planned.peaks
    high, low = peaks.peak_bytes(planned.default), peaks.peak_bytes(peaks.smallest())
    steps = MONOTONE_BUDGETS - 1
    budgets = [round(high * (low / high) ** (step / steps)) for step in range(steps)] + [low]
    start = time.thread_time()
    plans = [peaks.within(budget) for budget in budgets]
    choosing_seconds = time.thread_time() - start
    measured = {plan: planned.measured_peak(plan) for plan in dict.fromkeys(plans)}
    once = (count for node, count in planned.planner.costs.flops.items() if node in planned.default.forward_set)
    return {
        "decision_seconds": planned.seconds + choosing_seconds,
        "forward_flops": sum(once),
        "extra": {
            "note": workload.note,
            "nodes": planned.nodes,
            "points": len(peaks.frontier.points),
            "budgets": budgets,
            "measured": [measured[plan] for plan in plans],
            "predicted": [peaks.peak_bytes(plan) for plan in plans],
            "recompute_seconds": [planned.cost(plan) / FEMTOSECONDS for plan in plans],
            "recomputed_flops": [planned.flops(plan) for plan in plans],
            "distinct_plans": len(measured),
        },
    }


def measure_chain(workload: Workload, layers: int) -> dict[str, Any]:
    """The smallest peak of a chain whose recomputation is at most one forward: the fields of a row."""
    planned = Planned.of(workload)
    problem = planned.peaks.step.problem
    once = sum(problem.cost[operator] for operator in problem.before_boundary)
    point = next(point for point in planned.peaks.frontier.points if point.cost <= once)
    plan = planned.peaks.step.plan_of(point.sequence, point.origin)
    (parameter,) = workload.model.parameters()
    return {
        "predicted_peak_bytes": planned.peaks.peak_bytes(plan),
        "peak_bytes": planned.measured_peak(plan),
        "decision_seconds": planned.seconds,
        "extra": {
            "note": workload.note,
            "nodes": planned.nodes,
            "layers": layers,
            "activation_bytes": parameter.untyped_storage().nbytes(),
            "forwards": planned.cost(plan) / once,
            "points": len(planned.peaks.frontier.points),
        },
    }


def _built(model: str) -> Workload:
    name, overrides = parse_spec(model)
    return build(name, **overrides)


def _parse_arguments() -> argparse.Namespace:
    listed = results.listed
    parser = argparse.ArgumentParser(prog="python -m bench.budget", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--models",
        type=listed,
        default=listed(MODELS),
        help=f"model[:key=value...], comma-separated; models: {', '.join(BUILDERS)}",
    )
    parser.add_argument("--part", type=listed, default=PARTS, help="peaks, monotone, chains, comma-separated; all")
    parser.add_argument("--jobs", type=int, default=1, help="models measured at a time")
    parser.add_argument("--json", type=Path, default=results.RESULTS / "budget.json")
    parser.add_argument("--row", help="measure this one row of the model named, in this process")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.part) - set(PARTS)):
        parser.error(f"no part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    try:
        for spec in arguments.models:
            parse_spec(spec)
    except ValueError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    sys.exit(main())
