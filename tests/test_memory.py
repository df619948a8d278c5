"""The simulator against the allocator: byte for byte op by op, by hand on a tiny chain."""

from __future__ import annotations

import copy
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
from remat.settings import Settings
from tests import checks, graphs

pytestmark = pytest.mark.usefixtures("no_collection")


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
        scalars = [argument for argument in arguments[len(saved) :] if argument.ndim == 0]  # as backward() does
        del saved
        steps = len(alive)
        gradients = backward(arguments)
        peak = meter.peak() - before
    del outputs, gradients, scalars
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
def test_simulated_bytes_are_the_allocators_after_every_operator_and_at_the_peak(name: str):
    planner = graphs.planner(name, Settings(inner="eager"))
    for plan in plans_of(planner):
        timeline = simulate(plan)
        truth = measure(passes.rewrite(plan, planner.rules), planner.joint)
        assert timeline.saved_bytes == truth.saved_bytes
        simulated = predicted(timeline)
        assert simulated.keys() == truth.alive_bytes.keys()
        wrong = {key: (simulated[key], true) for key, true in truth.alive_bytes.items() if simulated[key] != true}
        assert wrong == {}
        assert timeline.peak_bytes == max(truth.alive_bytes.values())
        assert simulate(plan, lambda node: planner.scratch.get(node, 0)).peak_bytes == truth.peak_bytes


# --- by hand: a value of 4 x 16 floats has 256 bytes, the gradients of w (8 x 16) and x (4 x 8) 512 and 128 ---------


def cos_of_exp(x: Tensor, w: Tensor) -> Tensor:
    return torch.cos(torch.exp(x @ w))


def timeline_of(fn: Callable[..., Any], saved: list[str]) -> tuple[Timeline, list[tuple[str, int]]]:
    planner = graphs.planner_of(graphs.joint_of(fn, graphs.leaf(4, 8), graphs.leaf(8, 16)))
    by_name = planner.joint.by_name
    plan = make_plan(planner.joint, [by_name[name] for name in ("primals_1", "primals_2", *saved)], "hand")
    timeline = simulate(plan)
    return timeline, list(zip(timeline.names, timeline.alive_bytes, strict=True))


# The result is held by the caller (256 throughout the backward); the incoming gradient dies in `mul`.
END = [("mul_1", 1024), ("permute", 512), ("mm_1", 1024), ("permute_1", 1024), ("mm_2", 1152)]


def test_timeline_by_hand_with_a_saved_value():
    timeline, steps = timeline_of(cos_of_exp, ["exp"])
    forward = [("mm", 256), ("exp", 512), ("cos", 512)]
    assert steps == [*forward, ("sin", 1024), ("neg", 1280), ("mul", 1280), *END]
    assert (timeline.peak_bytes, timeline.peak_at) == (1280, "neg")
    assert (timeline.forward_steps, timeline.saved_bytes) == (3, 256)


def test_timeline_by_hand_with_one_operator_recomputed():
    timeline, steps = timeline_of(cos_of_exp, ["mm"])
    forward = [("mm", 256), ("exp", 512), ("cos", 768)]  # mm stays: it is saved
    assert steps == [*forward, ("exp", 1024), ("sin", 1024), ("neg", 1280), ("mul", 1280), *END]
    assert timeline.saved_bytes == 256


def test_timeline_by_hand_with_everything_recomputed():
    timeline, steps = timeline_of(cos_of_exp, [])
    forward = [("mm", 256), ("exp", 512), ("cos", 512)]
    backward = [("mm", 768), ("exp", 1024), ("sin", 1024), ("neg", 1280), ("mul", 1280)]
    assert steps == [*forward, *backward, *END]
    assert timeline.saved_bytes == 0


def test_saved_value_that_the_caller_holds_too_lives_to_the_end_and_counts_once():
    def exp(x: Tensor, w: Tensor) -> Tensor:
        return torch.exp(x @ w)

    timeline, steps = timeline_of(exp, ["exp"])
    forward = [("mm", 256), ("exp", 512)]
    assert steps == [*forward, ("mul", 768), ("permute", 512), ("mm_1", 1024), ("permute_1", 1024), ("mm_2", 1152)]
    assert timeline.saved_bytes == 256


def test_incoming_gradient_counts_where_the_backward_runs_nothing():
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    planner = graphs.planner_of(graphs.joint_of(add, graphs.leaf(4, 16), graphs.leaf(4, 16)))
    plan = planner.choose()[0].plan
    assert plan.backward == ()
    assert measure(passes.rewrite(plan, planner.rules), planner.joint).peak_bytes == 512
    assert simulate(plan).peak_bytes == 512
