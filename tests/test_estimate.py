"""Predicted seconds of a step: what they grow with, and that the default plan's are no more than PyTorch's."""

from __future__ import annotations

import dataclasses

import pytest
from torch import Tensor, fx

from remat import costs as cost_model
from remat.costs import Costs
from remat.estimate import Estimate
from remat.joint import JointGraph
from remat.plan import Plan, make_plan
from remat.plans import Planner
from tests import graphs


def matmuls(joint: JointGraph) -> list[fx.Node]:
    return [node for node in joint.nodes if str(node.target) == "aten.mm.default"]


def reading(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The backward reads the product of the first two."""
    return ((a @ b).sin() @ c).sum()


@pytest.fixture
def small() -> Planner:
    return graphs.planner_of(graphs.joint_of(reading, graphs.leaf(64, 64), graphs.leaf(64, 64), graphs.leaf(64, 64)))


def kept_and_rerun(planner: Planner) -> tuple[Plan, Plan]:
    """The plans that save the first product, and that run it again."""
    joint = planner.joint
    inputs = [node for node in joint.nodes if node.op == "placeholder" and node in joint.required_forward]
    product = matmuls(joint)[0]
    return make_plan(joint, [*inputs, product], "kept"), make_plan(joint, inputs, "again")


@pytest.mark.parametrize("name", sorted(graphs.MODELS))
def test_a_step_takes_time_and_its_flops_are_those_of_what_runs(name: str) -> None:
    planner = graphs.planner(name)
    for candidate in (planner.torch_default(), planner.smallest(), planner.random(1)):
        plan, estimate = candidate.plan, candidate.estimate
        assert estimate.step_seconds > 0
        assert estimate.extern_flops == sum(cost_model.flops(node) for node in (*plan.forward, *plan.backward))


def test_running_a_matmul_again_adds_its_flops_and_time(small: Planner) -> None:
    kept, again = (Estimate(plan, small.costs) for plan in kept_and_rerun(small))
    assert again.extern_flops - kept.extern_flops == 2 * 64**3
    assert again.step_seconds > kept.step_seconds


def priced(costs: Costs, seconds: float) -> Costs:
    """The same prices, but for the first product, of which it is known what it takes."""
    return dataclasses.replace(costs, known_seconds={matmuls(costs.joint)[0]: seconds})


def test_known_seconds_count_once_for_each_run(small: Planner) -> None:
    kept, again = kept_and_rerun(small)
    for plan, runs in ((kept, 1), (again, 2)):
        cheap, dear = (Estimate(plan, priced(small.costs, seconds)).step_seconds for seconds in (1.0, 3.0))
        assert dear - cheap == pytest.approx(2.0 * runs)


def test_an_operator_known_to_take_no_time_takes_none(small: Planner) -> None:
    kept, _ = kept_and_rerun(small)
    nothing, one = (Estimate(kept, priced(small.costs, seconds)).step_seconds for seconds in (0.0, 1.0))
    assert one - nothing == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("name", sorted(graphs.MODELS))
def test_the_default_plan_is_predicted_no_slower_than_pytorchs(name: str) -> None:
    planner = graphs.planner(name)
    chosen, theirs = planner.choose()[0], planner.reference
    assert chosen.estimate.step_seconds <= theirs.estimate.step_seconds
    assert chosen.estimate.extern_flops <= theirs.estimate.extern_flops
