"""Are the prices true? Predicted against measured step times under Inductor, and the default plan against Inductor's.

    python -m bench.costs --part predict --models gpt2:layers=1
    python -m bench.costs --part default,half

Three parts. `predict`: eight plans of each model compiled and timed in turns, beside what each source of prices
(`roofline`, `profile`, `learned`) predicts from a calibration made just before. `default`: the default plan, without
any calibration, against Inductor's in pairs of steps, with what both generate (a dry run). `half`: the plan at budget
0.5 beside random plans of no higher predicted peak. Rows measured with the same sources are not measured again.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._inductor.config as inductor_config

from bench import results
from bench.costs_tables import PLANS, PREDICT, PRICES, cells, default_cells, half_cells
from bench.models import Workload, build, parse_spec
from bench.results import Row
from bench.timing import paired_ratio, seconds, training_step, use_one_thread
from bench.variants import LossFunction, disable_compile_caches, parse_variant
from remat import exact, measured, partitioner, snapshot
from remat.calibrate import calibrate
from remat.capture import joint_graph
from remat.costs import Costs
from remat.dryrun import DryRun, dry_run_partition
from remat.elsewhere import partition_for
from remat.estimate import Estimate
from remat.mincut import CutSolver
from remat.network import build as build_network
from remat.partitioner import Decision, known_seconds
from remat.plans import Candidate, Planner
from remat.settings import Settings, resolve
from remat.store import open_store

PARTS = (PREDICT, "default", "half")
# Depth repeats, and eight plans of each are compiled.
MODELS = {
    PREDICT: ("mlp:layers=12", "gpt2:layers=1", "llama:layers=1", "bert:layers=1", "vit:layers=2"),
    "default": ("mlp:layers=40", "gpt2", "llama", "bert", "vit", "t5", "convnext", "resnet"),
    "half": ("mlp:layers=12", "gpt2:layers=1"),
}
# Steps of each plan, in turns.
ROUNDS = 15
RANDOM_PLANS = 5
SOURCES = (
    *(f"bench/{name}.py" for name in ("costs", "models", "chargpt", "timing")),
    "remat/*.py",
    "passes/*.py",
)
CPU = torch.device("cpu")


def main() -> int:
    arguments = _parse_arguments()
    use_one_thread()
    if arguments.row:
        rows: dict[str, Callable[[str, argparse.Namespace], Iterator[Row]]] = {
            PREDICT: predicted_rows,
            "default": default_rows,
            "half": half_rows,
        }
        for row in rows[arguments.part[0]](arguments.models[0], arguments):
            results.write_row(arguments.json, row)
        return 0
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.part:
            for model in arguments.models or MODELS[part]:
                if not _ensure(arguments, part, model, folder):
                    failed.append(f"{part} {model}")
    rows_now = results.read_rows(arguments.json)
    for table in (cells, default_cells, half_cells):
        print("\n".join("  ".join(line) for line in table(rows_now)))
    return 1 if failed else 0


def _ensure(arguments: argparse.Namespace, part: str, model: str, folder: str) -> bool:
    """Make the rows of one part of one model in a fresh process, unless the file has current ones."""
    known = [row for row in results.read_rows(arguments.json) if row.model == model and row.extra["part"] == part]
    if known and all(row.extra["sources"] == results.source_hash(SOURCES) for row in known):
        return True
    print(f"measuring {part} {model}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "bench.costs", "--row", "--part", part, "--models", model]
    command += ["--json", str(arguments.json), "--pairs", str(arguments.pairs)]
    # The default plan is the one of a user who has calibrated nothing.
    store = Path(folder, "calibrated" if part == PREDICT else "empty")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REMAT_")}
    return subprocess.run(command, env=environment | {"REMAT_CACHE_DIR": str(store)}).returncode == 0


# --- plans that run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Running:
    """A compiled model with what was decided about it."""

    name: str
    call: LossFunction
    workload: Workload
    decision: Decision
    compile_seconds: float

    def step(self) -> None:
        """One forward and backward."""
        training_step(self.call, self.workload.args, self.workload.model.parameters())


def _compiled(model: str, name: str, options: Mapping[str, Any]) -> Running:
    spec, overrides = parse_spec(model)
    workload = build(spec, **overrides)
    decisions: list[Decision] = []
    original = partitioner.decide

    def decide(*arguments: Any, **keywords: Any) -> Decision:
        decisions.append(original(*arguments, **keywords))
        return decisions[-1]

    torch.compiler.reset()
    with mock.patch.object(partitioner, "decide", decide):
        call = torch.compile(workload.model, backend="remat", options=dict(options))
        started = time.perf_counter()
        training_step(call, workload.args, workload.model.parameters())
        compile_seconds = time.perf_counter() - started
    (decision,) = decisions
    return Running(name, call, workload, decision, compile_seconds)


def _timed_in_turns(plans: list[Running]) -> list[list[float]]:
    """Seconds of each plan's steps: a round runs each once, so that all see the same machine."""
    for plan in plans:
        plan.step()
    times: list[list[float]] = [[] for _ in plans]
    for turn in range(ROUNDS):
        order = range(len(plans)) if turn % 2 else reversed(range(len(plans)))
        for place in order:
            times[place].append(seconds(plans[place].step))
    return times


def _setup() -> None:
    disable_compile_caches()
    inductor_config.compile_threads = 1


# --- predicted and measured --------------------------------------------------------------------------------------


def predicted_rows(model: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """Eight plans of a model: the seconds of their steps, and what each source of prices says."""
    _setup()
    settings = resolve({"cost": "profile"})[0]
    calibration = calibrate(CPU, settings, refresh=True) if _is_uncalibrated(settings) else None
    plans = [_compiled(model, name, options) for name, options in PLANS.items()]
    times = _timed_in_turns(plans)
    cold, warm = _profiling_seconds(plans[0].decision)
    fields = results.provenance("bench.costs", "cpu")
    for plan, measured_seconds in zip(plans, times, strict=True):
        chosen = plan.decision.chosen.plan
        yield Row(
            model,
            plan.name,
            PLANS[plan.name],
            **fields,
            compile_seconds=plan.compile_seconds,
            extra={
                "part": PREDICT,
                "sources": results.source_hash(SOURCES),
                "note": plan.workload.note,
                "seconds": measured_seconds,
                "predicted": {cost: _predicted(plan.decision, cost) for cost in PRICES},
                "profiling_seconds": [cold, warm],
                "calibration_seconds": None if calibration is None else calibration.seconds,
                "saved_values": len(chosen.saved),
            },
        )


def _is_uncalibrated(settings: Settings) -> bool:
    return snapshot.load(CPU, settings).origin != snapshot.CALIBRATED


def _predicted(decision: Decision, cost: str) -> float:
    """Seconds of a step of this plan by one source of prices."""
    settings = resolve({"cost": cost})[0]
    prices = snapshot.load(CPU, settings)
    known = known_seconds(decision.joint, prices, settings)
    return Estimate(decision.chosen.plan, Costs(decision.joint, prices.device, settings, known)).step_seconds


def _profiling_seconds(decision: Decision) -> tuple[float, float]:
    """What timing the operators of a graph takes, with nothing known and with all of it known."""
    machine = snapshot.machine_of(CPU)
    assert machine is not None
    name = snapshot.timings_name(CPU, machine)
    spent = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            started = time.perf_counter()
            measured.seconds_of(decision.joint, open_store(folder), name)
            spent.append(time.perf_counter() - started)
    return spent[0], spent[1]


# --- the default plan --------------------------------------------------------------------------------------------


def default_rows(model: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """The default plan: its step time over Inductor's, in pairs, and what both generate."""
    _setup()
    plan = _compiled(model, "remat", {"strict": True})
    spec, overrides = parse_spec(model)
    peer = build(spec, **overrides)
    peer_call = parse_variant("inductor", "inductor").compile(peer.model)
    training_step(peer_call, peer.args, peer.model.parameters())
    ratio = paired_ratio(
        plan.step, lambda: training_step(peer_call, peer.args, peer.model.parameters()), arguments.pairs
    )
    ours = dry_run_partition(plan.decision.partition, plan.decision.joint)
    theirs = _inductors(model)
    yield Row(
        model,
        "remat",
        {"strict": True},
        **results.provenance("bench.costs", "cpu"),
        predicted_peak_bytes=plan.decision.summary.predicted_peak_bytes,
        peak_bytes=ours.peak_bytes,
        saved_bytes=ours.saved_bytes,
        step_ratio=ratio.median,
        step_ratio_ci=(ratio.low, ratio.high),
        decision_seconds=plan.decision.summary.decision_seconds,
        compile_seconds=plan.compile_seconds,
        extra={
            "part": "default",
            "sources": results.source_hash(SOURCES),
            "note": plan.workload.note,
            "peer": "inductor",
            "pairs": ratio.pairs,
            "figures": _figures(ours),
            "peer_figures": _figures(theirs),
            "predicted": _parts(plan.decision.chosen),
            "peer_predicted": _parts(plan.decision.planner.torch_default()),
        },
    )


def _inductors(model: str) -> DryRun:
    """Inductor's own partition of the model, lowered."""
    spec, overrides = parse_spec(model)
    workload = build(spec, **overrides)
    torch.manual_seed(0)
    joint = joint_graph(workload.model, *workload.args)
    planned, partition, _ = partition_for(joint, resolve({"partitioner": "torch", "budget": 1.0})[0])
    return dry_run_partition(partition, planned)


def _figures(dry: DryRun) -> dict[str, Any]:
    return {
        "peak_bytes": dry.peak_bytes,
        "traffic_bytes": dry.traffic_bytes,
        "kernels": len(dry.kernels),
        "launches": dry.kernel_launches,
        "extern_flops": dry.extern_flops,
    }


def _parts(candidate: Candidate) -> dict[str, float]:
    """Where a step's predicted seconds go: operators outside, and generated kernels by what bounds them."""
    estimate = candidate.estimate
    lowering = estimate.lowering
    halves = ((lowering.forward, lowering.forward_order), (lowering.backward, candidate.plan.backward))
    parts = {"outside": 0.0, "traffic": 0.0, "arithmetic": 0.0}
    for kernels, order in halves:
        for kernel in kernels:
            moved = estimate.costs.move_seconds(kernel.read_bytes + kernel.written_bytes)
            spent = estimate.kernel_seconds(kernel, order)
            bound = spent > moved + estimate.costs.launch_seconds
            parts["outside" if kernel.extern else "arithmetic" if bound else "traffic"] += spent
    return parts


# --- half of PyTorch's default plan's peak -----------------------------------------------------------------------


def half_rows(model: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """The plan at budget 0.5 and random plans of no higher predicted peak, timed in turns."""
    _setup()
    ours = _compiled(model, "remat-0.5", {"strict": True, "budget": 0.5})
    allowed = ours.decision.chosen.fused_peak_bytes
    plans = [ours]
    for number, candidate in enumerate(_random_within(ours.decision.planner, allowed)):

        def planned(planner: Planner, _: int, found: Candidate = candidate) -> Candidate:
            return _same(planner, found)

        with mock.patch.object(Planner, "random", planned):
            plans.append(_compiled(model, f"random-{number}", {"strict": True, "plan_seed": number}))
    times = _timed_in_turns(plans)
    for plan, measured_seconds in zip(plans, times, strict=True):
        yield Row(
            model,
            plan.name,
            {"budget": 0.5} if plan is ours else {},
            **results.provenance("bench.costs", "cpu"),
            peak_bytes=_peak_bytes(plan),
            extra={
                "part": "half",
                "sources": results.source_hash(SOURCES),
                "note": plan.workload.note,
                "seconds": measured_seconds,
                "predicted_peak_bytes": plan.decision.chosen.fused_peak_bytes,
            },
        )


def _peak_bytes(plan: Running) -> int:
    """The exact peak of the code that runs."""
    with exact.schedule(plan.decision.planner.settings):
        return dry_run_partition(plan.decision.partition, plan.decision.joint).peak_bytes


def _random_within(planner: Planner, allowed: int) -> Iterator[Candidate]:
    """Random plans of at most this predicted peak: minimum cuts at random prices, bytes made dearer until one fits."""
    generator, joint = np.random.default_rng(0), planner.joint
    rules = replace(planner.rules, unwise_save={})
    found: list[tuple[Any, ...]] = []
    while len(found) < RANDOM_PLANS:
        prices = {node: [int(10 ** generator.uniform(0, 6)) for _ in range(2)] for node in joint.nodes}
        save, again = ({node: pair[place] for node, pair in prices.items()} for place in range(2))
        network = build_network(joint, rules, save.__getitem__, again.__getitem__)
        solver = CutSolver(network)
        for byte_price in (0, 1, 10, 100, 10**3, 10**4):
            cut = solver.minimum_cut(byte_price)
            candidate = planner.candidate([joint.nodes[position] for position in cut.saved()], "random")
            if candidate.fused_peak_bytes <= allowed:
                if candidate.plan.saved not in found:
                    found.append(candidate.plan.saved)
                    yield candidate
                break


def _same(planner: Planner, candidate: Candidate) -> Candidate:
    """A plan of another capture of the same graph: the same values by name."""
    return planner.candidate([planner.joint.by_name[node.name] for node in candidate.plan.saved], "random")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.costs", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--part", type=results.listed, default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--models", type=results.listed, default=[], help="comma-separated; default: each part's own")
    parser.add_argument("--pairs", type=int, default=30, help="timed pairs of steps of the default plan and Inductor's")
    parser.add_argument("--json", type=Path, default=results.RESULTS / "costs.json")
    parser.add_argument("--row", action="store_true", help="make the rows of the one part and model named")
    arguments = parser.parse_args()
    if not set(arguments.part) <= set(PARTS):
        parser.error(f"--part: of {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
