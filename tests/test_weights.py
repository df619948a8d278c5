"""Every weight moves the cut the way its help text says, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from remat import costs, ops
from remat.costs import FEMTOSECONDS, MIB
from remat.devices import CPU
from remat.joint import JointGraph
from remat.ops import Kind
from remat.plans import Planner
from remat.settings import Settings
from tests import graphs

RISING = [0.0, 0.01, 0.1, 1.0, 3.0, 10.0, 100.0, 1e4]
UNMOVED = Settings()
# So dear to save (in microseconds a MiB) that matmuls and reductions of `mixed` are worth running again.
DEAR = Settings(memory_price=1000.0)


@torch.library.custom_op("rematweights::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _gradient(ctx: Any, gradient: Tensor) -> Tensor:
    (output,) = ctx.saved_tensors
    return gradient * output.sign() * 2


twice.register_autograd(_gradient, setup_context=_keep)


def mixed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Matmuls cheap (64 wide) and dear (1024 deep), transcendental functions, reductions."""
    narrow = torch.exp(torch.sin(x @ up))
    wide = torch.tanh(torch.logsumexp(narrow, 1, keepdim=True) * narrow)
    return torch.sigmoid(wide @ down).softmax(1)


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    return graphs.joint_of(mixed, graphs.leaf(64, 1024), graphs.leaf(1024, 64), graphs.leaf(64, 256))


def planners(joint: JointGraph, name: str, values: Sequence[Any], base: Settings = UNMOVED) -> list[Planner]:
    return [graphs.planner_of(joint, replace(base, **{name: value})) for value in values]


def operators(nodes: Sequence[fx.Node]) -> list[str]:
    return [ops.name(node).removesuffix(".default") for node in nodes]


def save_cost(planner: Planner, at: Planner) -> int:
    """What the cut of `planner` saves, at the prices of another."""
    plan = planner.cut(0).plan
    return sum(at.costs.save_price(at.joint.by_name[node.name]) for node in plan.saved)


def recompute_cost(planner: Planner, at: Planner) -> int:
    """What the cut of `planner` recomputes, at the prices of another."""
    plan = planner.cut(0).plan
    forward = plan.forward_set
    again = [node.name for node in plan.backward if node in forward]
    return sum(at.costs.recompute_price(at.joint.by_name[name]) for name in again)


def saved_bytes(planner: Planner) -> int:
    return planner.cut(0).saved_bytes


def test_higher_memory_weight_saves_less_and_recomputes_more(joint: JointGraph):
    prices = graphs.planner_of(joint)
    cuts = planners(joint, "memory_weight", RISING)
    saving = [save_cost(cut, at=prices) for cut in cuts]
    again = [recompute_cost(cut, at=prices) for cut in cuts]
    assert saving == sorted(saving, reverse=True)
    assert again == sorted(again)
    middle = RISING.index(1.0)
    assert saving[0] > saving[middle] > saving[-1]
    assert again[0] < again[-1]


def test_higher_recompute_weight_recomputes_less_and_saves_more(joint: JointGraph):
    prices = graphs.planner_of(joint)
    cuts = planners(joint, "recompute_weight", RISING, DEAR)
    saving = [save_cost(cut, at=prices) for cut in cuts]
    again = [recompute_cost(cut, at=prices) for cut in cuts]
    assert saving == sorted(saving)
    assert again == sorted(again, reverse=True)
    middle = RISING.index(1.0)
    assert saving[0] < saving[middle] < saving[-1]
    assert again[0] > again[-1]


def test_memory_weight_and_recompute_weight_are_one_exchange_rate(joint: JointGraph):
    for factor in (0.01, 3.0, 100.0):
        (dear,) = planners(joint, "memory_weight", [factor])
        (cheap,) = planners(joint, "recompute_weight", [1 / factor])
        assert operators(dear.cut(0).plan.saved) == operators(cheap.cut(0).plan.saved)


def test_higher_contraction_weight_recomputes_fewer_contractions(joint: JointGraph):
    counts = []
    for planner in planners(joint, "contraction_weight", RISING, DEAR):
        again = planner.cut(0).plan.recomputed
        counts.append(sum(ops.kind(node) is Kind.CONTRACTION for node in again))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[RISING.index(1.0)] > counts[-1] == 0


def test_contraction_weight_moves_contractions_alone_on_top_of_recompute_weight(joint: JointGraph):
    plain = graphs.planner_of(joint)
    weighted = graphs.planner_of(joint, Settings(recompute_weight=2.0, contraction_weight=3.0))
    kinds = set()
    for node in plain.joint.required_forward:
        price = plain.costs.recompute_price(node)
        moved = weighted.costs.recompute_price(weighted.joint.by_name[node.name])
        is_contraction = ops.kind(node) is Kind.CONTRACTION
        assert moved == pytest.approx((6 if is_contraction else 2) * price, abs=6)
        kinds.add(is_contraction and price > 0)
    assert kinds == {True, False}


def kernels_added(planner: Planner) -> int:
    """Kernels that the cut runs again: those whose price has a launch in it."""
    without = graphs.planner_of(planner.joint, replace(planner.settings, launch_overhead=0.0))
    with_one = graphs.planner_of(planner.joint, replace(planner.settings, launch_overhead=1.0))
    return sum(
        with_one.costs.recompute_price(with_one.joint.by_name[node.name])
        > without.costs.recompute_price(without.joint.by_name[node.name])
        for node in planner.cut(0).plan.recomputed
    )


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_higher_launch_overhead_recomputes_fewer_kernels(joint: JointGraph, inner: str):
    base = replace(DEAR, inner=inner)
    values = [0.0, 1.0, 10.0, 100.0, 1e5]
    counts = [kernels_added(planner) for planner in planners(joint, "launch_overhead", values, base)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0
    assert counts[-1] == 0


def test_launch_overhead_is_in_microseconds_and_the_devices_own_by_default(joint: JointGraph):
    base = Settings(inner="eager")
    low, high, own, same = planners(joint, "launch_overhead", [1.0, 4.0, None, CPU.launch_seconds * 1e6], base)
    seen = set()
    for node in low.joint.required_forward:
        prices = [p.costs.recompute_price(p.joint.by_name[node.name]) for p in (low, high, own, same)]
        seen.add(prices[1] - prices[0])
        assert prices[2] == pytest.approx(prices[3], abs=2)
    microsecond = FEMTOSECONDS // 10**6
    assert seen <= {0, *range(3 * microsecond - 1, 3 * microsecond + 2)}
    assert len(seen) > 1


def test_higher_memory_price_saves_fewer_bytes_down_to_the_fewest(joint: JointGraph):
    cuts = planners(joint, "memory_price", [0.0, *RISING[1:], 1e9])
    kept = [saved_bytes(cut) for cut in cuts]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]
    assert kept[-1] == cuts[0].smallest().saved_bytes


def test_memory_price_is_in_microseconds_per_mebibyte(joint: JointGraph):
    free, priced = planners(joint, "memory_price", [0.0, 8.0])
    for node in free.joint.nodes:
        extra = priced.costs.save_price(priced.joint.by_name[node.name]) - free.costs.save_price(node)
        assert extra == pytest.approx(8e-6 * costs.saved_bytes(node) / MIB * FEMTOSECONDS, abs=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_weight", 100.0), ("recompute_weight", 100.0), ("contraction_weight", 0.0),
        ("launch_overhead", 1e5), ("memory_price", 100.0),
    ],
)  # fmt: skip
def test_chosen_plan_is_the_cut_at_the_users_weights(joint: JointGraph, name: str, value: float):
    (planner,) = planners(joint, name, [value])
    chosen, _ = planner.choose()
    assert chosen.plan.saved == planner.cut(0).plan.saved
    assert chosen.seconds == pytest.approx(planner.cut(0).seconds)


@pytest.mark.parametrize("operator", ["aten.exp", "aten.exp.default", "aten.tanh"])
def test_operators_named_in_save_ops_are_never_recomputed_and_others_still_are(operator: str):
    def run(x: Tensor) -> Tensor:
        return torch.tanh(torch.exp(torch.sin(x * 2).cumsum(0))).sigmoid().cumsum(1)

    joint = graphs.joint_of(run, graphs.leaf(16, 16))
    free = graphs.planner_of(joint).smallest().plan
    bound = graphs.planner_of(joint, Settings(save_ops=(operator,))).smallest().plan
    short = operator.removesuffix(".default")
    assert {"aten.exp", "aten.sin", "aten.tanh"} <= set(operators(free.recomputed))
    assert short not in operators(bound.recomputed)
    assert short in operators(bound.saved)
    assert "aten.sigmoid" in operators(bound.recomputed)


def test_save_ops_holds_against_every_weight_and_random_plan(joint: JointGraph):
    base = Settings(save_ops=("aten.mm", "aten.exp"), memory_weight=1e6, contraction_weight=0.0)
    planner = graphs.planner_of(joint, base)
    plans = [planner.cut(0).plan, planner.smallest().plan, *(planner.random(seed).plan for seed in range(10))]
    for plan in plans:
        assert not {"aten.mm", "aten.exp"} & set(operators(plan.recomputed))


def test_custom_operator_is_recomputed_only_when_declared_pure():
    def run(x: Tensor) -> Tensor:
        return torch.sin(twice(torch.exp(x)))

    joint = graphs.joint_of(run, graphs.leaf(64, 64))
    unknown = graphs.planner_of(joint)
    assert "rematweights.twice" in operators(unknown.smallest().plan.saved)
    assert "rematweights.twice" not in operators(unknown.smallest().plan.recomputed)
    for name in ("rematweights.twice", "rematweights.twice.default"):
        declared = graphs.planner_of(joint, Settings(recompute_ops=(name,)))
        assert "rematweights.twice" in operators(declared.smallest().plan.recomputed)
        assert "rematweights.twice" not in operators(declared.smallest().plan.saved)
    other = graphs.planner_of(joint, Settings(recompute_ops=("rematweights.thrice",)))
    assert "rematweights.twice" not in operators(other.smallest().plan.recomputed)


def test_declaring_an_operator_pure_frees_neither_random_draws_nor_writes():
    settings = Settings(recompute_ops=("aten.rand", "aten.bernoulli", "prims.inductor_seeds", "aten.copy_"))
    joint = graphs.joint("dropout")
    planner = graphs.planner_of(joint, settings)
    assert "prims.inductor_seeds" in operators(planner.smallest().plan.saved)
    assert "prims.inductor_seeds" not in operators(planner.smallest().plan.recomputed)
