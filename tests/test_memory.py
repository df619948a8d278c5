"""The simulator against the allocator: byte for byte op by op, by hand on a tiny chain, and fused never above."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from bench import memory
from remat import passes
from remat.eager import SEED_TRUE, OpByOp
from remat.joint import JointGraph
from remat.memory import Timeline, simulate
from remat.passes.partition import Partition
from remat.plan import Plan, make_plan
from remat.plans import Planner
from tests import checks, graphs

# oneDNN and the flash kernel take scratch from torch's allocator while they run: their peaks are not simulated.
HAVE_SCRATCH = {"convnet", "sdpa"}


@dataclass(frozen=True)
class Measured:
    """One step op by op, in bytes above those alive before it: at its peak, saved, and after each operator."""

    peak_bytes: int
    saved_bytes: int
    alive_bytes: dict[str, int]
    forward_steps: int


def watched(module: fx.GraphModule, note: Callable[[str], None]) -> OpByOp:
    """The graph as a program that reports after each operator, its arguments and results still alive."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = _reporting(SEED_TRUE.get(node.target, node.target), node.name, note)
    return OpByOp(fx.GraphModule(module, graph))


def _reporting(target: Callable[..., Any], name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    def run(*args: Any, **keywords: Any) -> Any:
        result = target(*args, **keywords)
        note(name)
        return result

    return run


def measure(partition: Partition, joint: JointGraph) -> Measured:
    """Run forward and backward as AOTAutograd does: outputs held to the end, saved values given away."""
    meter = memory.install("cpu")
    alive: dict[str, int] = {}
    inputs, tangents = checks.examples(checks.inputs_of(joint), 1), checks.examples(joint.tangents, 2)
    gc.collect()
    before = meter.live()

    def note_forward(name: str) -> None:
        alive[f"forward {name}"] = meter.live() - before

    def note_backward(name: str) -> None:
        alive[f"backward {name}"] = meter.live() - before

    forward, backward = watched(partition.forward, note_forward), watched(partition.backward, note_backward)
    with torch.no_grad():
        meter.reset_peak()
        results = list(forward(list(inputs)))
        outputs, saved = results[: joint.num_fwd_outputs], results[joint.num_fwd_outputs :]
        del results
        free = checks.owned(inputs)
        saved_bytes = sum(size for address, size in checks.owned(saved).items() if address not in free)
        tensors = len(saved) - partition.num_sizes
        arguments = [*saved[tensors:], *saved[:tensors], *(tangent.clone() for tangent in tangents)]
        del saved
        steps = len(alive)
        gradients = backward(arguments)
        peak = meter.peak() - before
    del outputs, gradients
    return Measured(peak, saved_bytes, alive, steps)


def predicted(timeline: Timeline) -> dict[str, int]:
    halves = ["forward"] * timeline.forward_steps + ["backward"] * (len(timeline.names) - timeline.forward_steps)
    keys = (f"{half} {name}" for half, name in zip(halves, timeline.names, strict=True))
    return dict(zip(keys, timeline.alive_bytes, strict=True))


def plans_of(planner: Planner) -> list[Plan]:
    """Default, smallest, at random prices, and by a coin."""
    drawn = [checks.drawn_choice(planner.joint, planner.rules, seed) for seed in range(5)]
    candidates = [planner.choose()[0], planner.smallest(), planner.random(0), planner.random(1)]
    plans = [candidate.plan for candidate in candidates]
    return plans + [make_plan(planner.joint, list(choice.saved), "coin") for choice in drawn]


@pytest.mark.parametrize("name", graphs.MODELS)
def test_simulated_bytes_are_the_allocators_at_every_step_and_at_the_peak(name: str):
    planner = graphs.planner(name)
    for plan in plans_of(planner):
        timeline = simulate(plan, fused=False)
        truth = measure(passes.rewrite(plan, planner.rules), planner.joint)
        assert timeline.saved_bytes == truth.saved_bytes
        print(plan.solver, timeline.peak_bytes , max(truth.alive_bytes.values()), truth.peak_bytes)
        simulated = predicted(timeline)
        wrong = {k: (simulated.get(k), v) for k, v in truth.alive_bytes.items() if simulated.get(k) != v}
        print(wrong)
    assert 0
