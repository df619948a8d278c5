"""Plans: never worse than PyTorch's default, budgets kept, the smallest smallest, random ones valid and repeatable."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from remat import passes
from remat.costs import FEMTOSECONDS
from remat.costs import saved_bytes as bytes_of
from remat.errors import InvalidPlan
from remat.joint import JointGraph
from remat.memory import simulate
from remat.plan import Plan, make_plan
from remat.plans import Candidate, Planner
from remat.rules import Rules, why_invalid
from remat.settings import Settings
from tests import checks, graphs

SEEDS = range(30)
# PyTorch's own cut reads these inputs again after the forward has written them (its fault pytorch#197039).
TORCH_IS_WRONG = {"counter", "snapshot"}


def with_settings(name: str, **values: object) -> Planner:
    return graphs.planner(name, replace(Settings(), **values))


def chosen(name: str, **values: object) -> Candidate:
    return with_settings(name, **values).choose()[0]


def drawn_plan(planner: Planner, seed: int) -> Plan:
    """A plan that no price explains: each value saved or recomputed by a coin."""
    choice = checks.drawn_choice(planner.joint, planner.rules, seed)
    return make_plan(planner.joint, list(choice.saved), "coin")


def names(plan: Plan) -> list[str]:
    return [node.name for node in plan.saved]


# --- the default plan --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["inductor", "eager"])
@pytest.mark.parametrize("name", sorted(set(graphs.MODELS) - TORCH_IS_WRONG))
def test_default_plan_has_no_more_saved_bytes_no_higher_peak_and_no_more_time_than_pytorchs(name: str, inner: str):
    mine, torchs = with_settings(name, inner=inner).choose()
    assert torchs.plan.solver == "torch"
    assert mine.saved_bytes <= torchs.saved_bytes
    assert mine.seconds <= torchs.seconds
    assert simulate(mine.plan).peak_bytes <= simulate(torchs.plan).peak_bytes
    assert mine.fused_peak_bytes <= torchs.fused_peak_bytes


@pytest.mark.parametrize("name", ["mlp", "residual", "attention", "bottleneck"])
def test_no_cut_of_the_ladder_beats_the_default_plan_within_pytorchs_saved_bytes_and_peak(name: str):
    planner = with_settings(name)
    mine, torchs = planner.choose()
    quick = [cut for cut in map(planner.cut, planner.ladder()) if cut.fits_within(torchs) and cut.runs_within(torchs)]
    allowed = [cut for cut in quick if cut.estimate.step_seconds <= mine.estimate.step_seconds]
    assert mine.fused_peak_bytes <= min(cut.fused_peak_bytes for cut in [*allowed, torchs])
    assert mine.estimate.step_seconds <= torchs.estimate.step_seconds


@pytest.mark.parametrize("name", sorted(TORCH_IS_WRONG))
def test_default_plan_is_valid_where_pytorchs_reads_an_input_that_was_written(name: str):
    planner = with_settings(name)
    mine, torchs = planner.choose()
    assert "an input that the forward writes" in str(why_invalid(torchs.plan, planner.rules))
    assert why_invalid(mine.plan, planner.rules) is None


@pytest.mark.parametrize("name", graphs.MODELS)
def test_chosen_plans_are_valid_and_give_the_backward_all_it_needs(name: str):
    planner = graphs.planner(name)
    for candidate in [planner.choose()[0], planner.smallest(), planner.cut(0), planner.cut(10**9)]:
        assert why_invalid(candidate.plan, planner.rules) is None
        assert checks.is_available(planner.joint, planner.rules, candidate.plan.saved) is None


@pytest.mark.parametrize("name", graphs.MODELS)
def test_price_and_bytes_of_a_cut_are_those_of_its_plan(name: str):
    planner = graphs.planner(name)
    for price in (0, 10_000):
        candidate = planner.cut(price)
        plan, costs = candidate.plan, planner.costs
        again = [node for node in plan.backward if node in plan.forward_set]
        total = sum(map(costs.save_price, plan.saved)) + sum(map(costs.recompute_price, again))
        assert candidate.seconds == pytest.approx(total / FEMTOSECONDS)
        assert candidate.saved_bytes == sum(map(bytes_of, plan.saved))
        cut = planner._solver.minimum_cut(price)
        assert total + price * candidate.saved_bytes == cut.value


@pytest.mark.parametrize("name", ["mlp", "residual", "attention"])
def test_partitioner_torch_takes_pytorchs_plan(name: str):
    mine, torchs = with_settings(name, partitioner="torch", budget="min").choose()
    assert mine is torchs
    assert names(mine.plan) == names(with_settings(name).torch_default().plan)


# --- the schedule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", graphs.MODELS)
def test_backward_runs_each_value_once_after_its_arguments_and_nothing_in_vain(name: str):
    planner = graphs.planner(name)
    joint = planner.joint
    candidates = [planner.choose()[0], planner.smallest(), planner.random(1)]
    for plan in [*(candidate.plan for candidate in candidates), *(drawn_plan(planner, seed) for seed in range(5))]:
        assert len(set(plan.backward)) == len(plan.backward)
        assert not set(plan.backward) & set(plan.saved)
        available = set(plan.saved) | set(joint.tangents)
        for node in plan.backward:
            assert available.issuperset(node.all_input_nodes), f"{node.name} runs before its arguments"
            available.add(node)
        assert available.issuperset(joint.backward_outputs)
        read = {argument for node in plan.backward for argument in node.all_input_nodes} | set(joint.backward_outputs)
        assert read.issuperset(plan.saved)
        in_vain = [node.name for node in plan.backward if node not in read and node not in joint.tangent_closure]
        assert in_vain == []


def test_saved_values_that_the_backward_does_not_need_are_left_out():
    joint = graphs.planner("bottleneck").joint
    everything = [node for node in joint.nodes if node not in joint.tangent_closure]
    plan = make_plan(joint, everything, "all")
    assert set(plan.saved) == set(joint.needed_by_backward)
    assert plan.recomputed == ()


def test_saved_values_are_in_graph_order_each_once_however_given():
    joint = graphs.planner("bottleneck").joint
    needed = list(joint.needed_by_backward)
    plan = make_plan(joint, [*reversed(needed), *needed], "twice")
    assert list(plan.saved) == needed


# --- the fewest saved bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", graphs.MODELS)
def test_smallest_saves_no_more_than_any_other_plan(name: str):
    planner = with_settings(name)
    fewest = planner.smallest().saved_bytes
    others = [planner.default(planner.torch_default()), *map(planner.random, SEEDS)]
    assert fewest <= min(other.saved_bytes for other in others)
    if name not in TORCH_IS_WRONG:
        assert fewest <= planner.torch_default().saved_bytes


@pytest.mark.parametrize("name", ["chain", "dropout", "multi_output", "views", "outputs", "counter", "snapshot"])
def test_smallest_saves_the_fewest_bytes_of_all_plans_and_is_the_fastest_of_those(name: str):
    planner = with_settings(name)
    choices = list(checks.all_choices(planner.joint, planner.rules))
    # What a solver leaves out as unwise to save would not have made the plan smaller.
    lax = Rules(planner.rules.no_recompute | planner.rules.unwise_recompute, planner.rules.no_save)
    fewest = min(choice.cost(bytes_of, lambda node: 0) for choice in choices)
    assert fewest == min(choice.cost(bytes_of, lambda node: 0) for choice in checks.all_choices(planner.joint, lax))
    least = min(
        choice.cost(planner.costs.save_price, planner.costs.recompute_price)
        for choice in choices
        if choice.cost(bytes_of, lambda node: 0) == fewest
    )
    smallest = planner.smallest()
    assert smallest.saved_bytes == fewest
    assert smallest.seconds == pytest.approx(least / FEMTOSECONDS)


# --- random plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", graphs.MODELS)
def test_random_plans_are_valid(name: str):
    planner = graphs.planner(name)
    for seed in SEEDS:
        plan = planner.random(seed).plan
        assert why_invalid(plan, planner.rules) is None
        assert checks.is_available(planner.joint, planner.rules, plan.saved) is None


@pytest.mark.parametrize("name", ["mlp", "residual", "attention", "convnet"])
def test_random_plans_repeat_by_seed_and_differ_between_seeds(name: str):
    planner, fresh = with_settings(name), graphs.planner_of(graphs.joint(name))
    drawn = [names(planner.random(seed).plan) for seed in SEEDS]
    assert [names(fresh.random(seed).plan) for seed in SEEDS[:5]] == drawn[:5]
    assert names(chosen(name, plan_seed=SEEDS[7]).plan) == drawn[7]
    assert len(set(map(tuple, drawn))) >= len(SEEDS) // 2


def test_random_plans_leave_the_global_generators_alone():
    import random

    before, tensors = random.getstate(), torch.get_rng_state()
    graphs.planner("residual").random(3)
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), tensors)


# --- the certificate of all: gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", graphs.MODELS)
def test_every_plan_gives_the_joint_graphs_outputs_gradients_and_buffers_to_the_bit(name: str):
    planner = graphs.planner(name)
    joint = planner.joint
    truth = checks.run_joint(graphs.joint(name))
    plans = [candidate.plan for candidate in (planner.choose()[0], planner.smallest(), planner.random(0))]
    plans += [drawn_plan(planner, seed) for seed in range(5)]
    for plan in plans:
        partition = passes.rewrite(plan, planner.rules)
        checks.check_reads(partition, joint)
        checks.check_same_bits(checks.run_partition(partition, joint), truth)


def test_every_plan_of_a_graph_with_symbolic_sizes_passes_the_sizes_that_the_backward_needs():
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = torch.exp(torch.cat([x, x[:1], x.sin()]) @ w)
        return torch.sigmoid(y).reshape(-1, 2).sum(1) * (y.shape[0] + x.shape[1])

    joint = graphs.joint_of(run, graphs.leaf(5, 8), graphs.leaf(8, 6), dynamic=True)
    planner = graphs.planner_of(joint)
    truth = checks.run_joint(joint)
    passed = set()
    candidates = [planner.choose()[0], planner.smallest(), planner.random(0)]
    for plan in [*(candidate.plan for candidate in candidates), *(drawn_plan(planner, seed) for seed in range(5))]:
        partition = passes.rewrite(plan, planner.rules)
        checks.check_reads(partition, planner.joint)
        checks.check_same_bits(checks.run_partition(partition, planner.joint), truth)
        passed.add(partition.num_sizes)
    assert max(passed) > 0


# --- the user's own policy ---------------------------------------------------------------------------------------


def under_policy(policy: CheckpointPolicy) -> JointGraph:
    """exp under the policy, in a region whose other operators the plan is free to save or recompute."""

    def decide(context: object, operator: object, *args: object, **keywords: object) -> CheckpointPolicy:
        return policy if operator is torch.ops.aten.exp.default else CheckpointPolicy.PREFER_SAVE

    def region(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(torch.exp((x @ w).cumsum(0)))

    def run(x: Tensor, w: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, decide)
        return torch.sigmoid(checkpoint(region, torch.cos(x), w, use_reentrant=False, context_fn=contexts))

    return graphs.joint_of(run, graphs.leaf(8, 8), graphs.leaf(8, 8))


def all_plans(planner: Planner) -> list[Plan]:
    candidates = [planner.choose()[0], planner.smallest(), planner.cut(0), *map(planner.random, range(8))]
    return [candidate.plan for candidate in candidates]


def test_operator_that_the_policy_must_save_is_saved_under_every_plan():
    planner = graphs.planner_of(under_policy(CheckpointPolicy.MUST_SAVE))
    for plan in all_plans(planner):
        assert "exp" in names(plan)
        assert "exp" not in [node.name for node in plan.recomputed]


def test_operator_that_the_policy_must_recompute_is_recomputed_under_every_plan():
    planner = graphs.planner_of(under_policy(CheckpointPolicy.MUST_RECOMPUTE))
    for plan in all_plans(planner):
        assert "exp" not in names(plan)
        assert "exp" in [node.name for node in plan.recomputed]


def test_plain_checkpoint_recomputes_its_region_and_keeps_what_enters_it():
    def run(x: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(checkpoint(exp_chain, torch.cos(x), w, use_reentrant=False))

    def exp_chain(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.exp(x @ w).cumsum(0)).sum(1)

    planner = graphs.planner_of(graphs.joint_of(run, graphs.leaf(8, 8), graphs.leaf(8, 8)))
    plan = planner.choose()[0].plan
    assert not {"mm", "exp", "cumsum", "tanh"} & set(names(plan))
    assert {"mm", "exp", "cumsum", "tanh"} <= {node.name for node in plan.recomputed}


def test_copy_of_an_input_that_the_forward_then_writes_is_kept_for_the_backward():
    """Inductor's passes drop the user's clone, so that the backward reads the written input itself."""

    def run(x: Tensor, buffer: Tensor) -> Tensor:
        y = torch.exp(buffer.clone() * x)
        buffer.mul_(0.5)
        return y

    joint = graphs.joint_of(run, graphs.leaf(4, 8), torch.randn(4, 8))
    planner = graphs.planner_of(joint)
    for candidate in (planner.choose()[0], planner.smallest()):
        partition = passes.rewrite(candidate.plan, planner.rules)
        checks.check_same_bits(checks.run_partition(partition, planner.joint), checks.run_joint(joint))


@pytest.mark.parametrize("name", sorted(TORCH_IS_WRONG))
def test_pytorchs_plan_is_refused_where_it_reads_an_input_that_was_written(name: str):
    planner = graphs.planner(name)
    with pytest.raises(InvalidPlan, match="an input that the forward writes"):
        passes.rewrite(planner.torch_default().plan, planner.rules)
