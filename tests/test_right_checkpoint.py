"""The user's own checkpointing, inside the compiled graph: its policies are orders, whatever the plan.

`tick` is a custom operator that counts its runs by label. A policy says must-save, must-recompute, or prefers one of
them; a step then runs it once, twice, or as the plan likes. At seven plans, op by op, against eager checkpointing.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import remat
from tests.everywhere import BUDGETS, Runs, assert_like_eager, compiled, every_plan, leaf, planned_since, same, step

# Where the plan matters less: a random plan stands for all.
three_plans = pytest.mark.parametrize("plan", ["default", "fewest", "min", "random0"])

RUNS: Counter[int] = Counter()


@torch.library.custom_op("remat_right::tick", mutates_args=())
def tick(x: Tensor, w: Tensor, label: int) -> Tensor:
    RUNS[label] += 1
    return torch.tanh(x @ w)


@tick.register_fake
def _(x: Tensor, w: Tensor, label: int) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def _tick_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2], output)


def _tick_backward(ctx: Any, grad: Tensor) -> Any:
    x, w, y = ctx.saved_tensors
    grad = grad * (1 - y * y)
    return grad @ w.t(), x.t() @ grad, None


tick.register_autograd(_tick_backward, setup_context=_tick_setup)
TICK = torch.ops.remat_right.tick


@torch.library.custom_op("remat_right::linear", mutates_args=())
def linear(x: Tensor, w: Tensor, label: int) -> Tensor:
    RUNS[label] += 1
    return x @ w


@linear.register_fake
def _(x: Tensor, w: Tensor, label: int) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def _linear_backward(ctx: Any, grad: Tensor) -> Any:
    x, w = ctx.saved_tensors
    return grad @ w.t(), x.t() @ grad, None


linear.register_autograd(
    _linear_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2])
)
LINEAR = torch.ops.remat_right.linear


def _policy(wanted: CheckpointPolicy, rest: CheckpointPolicy, ctx: Any, op: Any, *_: Any, **__: Any) -> Any:
    return wanted if op in (TICK.default, LINEAR.default) else rest


def contexts(wanted: CheckpointPolicy, rest: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE) -> Any:
    """A context function of selective checkpointing: this for `tick`, that for everything else."""
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, wanted, rest))


MUST_SAVE = contexts(CheckpointPolicy.MUST_SAVE)
MUST_RECOMPUTE = contexts(CheckpointPolicy.MUST_RECOMPUTE)
PREFER_SAVE = contexts(CheckpointPolicy.PREFER_SAVE)
PREFER_RECOMPUTE = contexts(CheckpointPolicy.PREFER_RECOMPUTE)


def inputs() -> list[Tensor]:
    return [leaf(6, 6), leaf(6, 6, seed=1)]


def two_blocks(context: Any) -> Callable[..., Tensor]:
    def block(x: Tensor, w: Tensor, label: int) -> Tensor:
        return torch.sin(TICK(x.exp() * 0.1, w, label)).exp()

    def run(x: Tensor, w: Tensor) -> Tensor:
        for label in range(2):
            x = checkpoint(block, x, w, label, use_reentrant=False, context_fn=context)
        return x.cos()

    return run


def runs_of_a_step(mine: Any, make: Callable[[], list[Tensor]] = inputs) -> dict[int, int]:
    """How often each labelled operator runs in a step after the one that compiles."""
    step(mine, make())
    RUNS.clear()
    step(mine, make())
    return dict(RUNS)


def runs_of_a_backward(mine: Any, make: Callable[[], list[Tensor]] = inputs) -> Counter[str]:
    """How often each operator runs in a backward after the one that compiles."""
    step(mine, make())
    loss = mine(*make()).sum()
    with Runs() as seen:
        loss.backward()
    return seen.counts


# --- orders --------------------------------------------------------------------------------------------------------


@every_plan
def test_must_save_runs_the_operator_once_a_step(plan: str) -> None:
    run = two_blocks(MUST_SAVE)
    assert_like_eager(run, inputs, plan, graphs=1)
    # Not even an operator declared pure runs again against the order.
    assert runs_of_a_step(compiled(run, plan, recompute_ops=["remat_right::tick"])) == {0: 1, 1: 1}


@every_plan
def test_must_recompute_runs_the_operator_twice_a_step(plan: str) -> None:
    run = two_blocks(MUST_RECOMPUTE)
    assert_like_eager(run, inputs, plan, graphs=1)
    counts = runs_of_a_step(compiled(run, plan))
    assert min(counts.values()) >= 2 if plan in BUDGETS else counts == {0: 2, 1: 2}


@three_plans
def test_must_save_holds_for_operators_of_torch(plan: str) -> None:
    def policy(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.sinh.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE

    def block(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.sinh(x @ w).erf() @ w).exp()

    def run(x: Tensor, w: Tensor) -> Tensor:
        context = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, x, w, use_reentrant=False, context_fn=context).sin()

    assert_like_eager(run, inputs, plan, graphs=1)
    seen = runs_of_a_backward(compiled(run, plan))
    # Two products for each gradient, none again; what must be recomputed is.
    assert (seen["aten.mm"], seen["aten.sinh"], seen["aten.erf"]) == (4, 0, 1)


@three_plans
def test_prefer_save_is_right_and_no_order(plan: str) -> None:
    run = two_blocks(PREFER_SAVE)
    assert_like_eager(run, inputs, plan, graphs=1)
    counts = runs_of_a_step(compiled(run, plan, recompute_ops=["remat_right::tick"]))
    assert set(counts) == {0, 1}
    assert set(counts.values()) <= ({2} if plan == "fewest" else {1} if plan == "default" else {1, 2})


@three_plans
def test_an_operator_of_unknown_purity_runs_once_where_recomputing_is_but_preferred(plan: str) -> None:
    run = two_blocks(PREFER_RECOMPUTE)
    assert_like_eager(run, inputs, plan, graphs=1)
    assert runs_of_a_step(compiled(run, plan)) == {0: 1, 1: 1}


@every_plan
def test_prefer_recompute_is_an_order_for_what_may_run_again(plan: str) -> None:
    run = two_blocks(PREFER_RECOMPUTE)
    counts = runs_of_a_step(compiled(run, plan, recompute_ops=["remat_right::tick"]))
    assert set(counts) == {0, 1}
    assert plan in BUDGETS or set(counts.values()) == {2}


@every_plan
@pytest.mark.parametrize("tail", [torch.relu, torch.abs, lambda y: y.logsumexp(1)])
def test_must_recompute_holds_where_the_backward_needs_but_a_mask_or_a_reduction_of_it(tail: Any, plan: str) -> None:
    # The mask is a value of the backward, which carries no tag: saved, it would defeat the order.
    def block(x: Tensor, w: Tensor, label: int) -> Tensor:
        return tail(LINEAR(x, w, label))

    def run(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(block, x, w, 7, use_reentrant=False, context_fn=MUST_RECOMPUTE).sum(0)

    def make() -> list[Tensor]:
        return [leaf(32, 16), leaf(16, 16, seed=1)]

    assert_like_eager(run, make, plan, graphs=1)
    # Under a budget what is made of it may be kept in its stead: itself it is not saved.
    assert runs_of_a_step(compiled(run, plan), make) == {7: 2} or plan in BUDGETS


@every_plan
def test_plain_checkpointing_of_relu_layers_keeps_no_masks(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        def block(y: Tensor) -> Tensor:
            return torch.relu(torch.relu(y @ w) @ w) @ w

        return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False).sum()

    (summary,) = assert_like_eager(run, lambda: [leaf(64, 32), leaf(32, 32, seed=1)], plan, graphs=1)
    saved = [(value.operator, value.bytes) for value in summary.saved if value.bytes]
    assert plan in BUDGETS or saved == [("aten.mm.default", 64 * 32 * 8)]


# --- plain checkpointing -------------------------------------------------------------------------------------------


def region(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(torch.sinh(torch.erf(x @ w) @ w))


@every_plan
def test_plain_checkpointing_keeps_nothing_of_a_region_but_what_goes_into_it(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(region, x, w, use_reentrant=False)
        return x.sum()

    before = len(remat.summaries())
    assert_like_eager(run, inputs, plan, graphs=1)
    (summary,) = planned_since(before, 1)
    if plan in BUDGETS:
        return
    # The outputs of the first two regions, 6 x 6 numbers of 8 bytes.
    assert summary.saved_bytes == 2 * 36 * 8
    assert {value.operator for value in summary.saved if value.bytes} == {"aten.sin.default"}
    seen = runs_of_a_backward(compiled(run, plan))
    # Each region once, from its own input: not from the start, and not its output where that is kept.
    assert (seen["aten.erf"], seen["aten.sinh"]) == (3, 3)
    assert seen["aten.sin"] == 0


@every_plan
def test_nested_checkpointing_is_right(plan: str) -> None:
    def inner(x: Tensor, w: Tensor, label: int) -> Tensor:
        return TICK(x.sin(), w, label).exp()

    def outer(x: Tensor, w: Tensor) -> Tensor:
        x = checkpoint(inner, x, w, 0, use_reentrant=False)
        return checkpoint(inner, x.cos(), w, 1, use_reentrant=False).sinh()

    def run(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(outer, checkpoint(outer, x, w, use_reentrant=False), w, use_reentrant=False).erf()

    assert_like_eager(run, inputs, plan, graphs=1)
    # A single-level plan runs each at most once more, where eager mode's nesting runs some three times.
    counts = runs_of_a_step(compiled(run, plan, recompute_ops=["remat_right::tick"]))
    assert plan in BUDGETS or all(count <= 4 for count in counts.values())


@three_plans
def test_reentrant_checkpointing_is_right(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(region, checkpoint(region, x.exp(), w, use_reentrant=True), w, use_reentrant=True).cos()

    assert_like_eager(run, inputs, plan, graphs=1)
    seen = runs_of_a_backward(compiled(run, plan))
    assert plan in BUDGETS or (seen["aten.erf"], seen["aten.sinh"]) == (2, 2)


class Blocks(nn.Module):
    """Modules with a batch norm. Eager mode's own replay moves its running statistics twice: not the truth here."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2)
        ).double()

    def forward(self, x: Tensor) -> Any:
        middle = []
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            middle.append(x)
        return x.exp(), middle[0]


@three_plans
def test_checkpointed_modules_move_their_statistics_once_a_step(plan: str) -> None:
    plain, mine = Blocks(checkpointed=False), Blocks(checkpointed=True)
    mine.load_state_dict(plain.state_dict())
    before = len(remat.summaries())
    run = compiled(mine, plan)
    for _ in range(2):
        same(step(run, [leaf(5, 6)]), step(plain, [leaf(5, 6)]), 1e-7, 1e-10)
        for a, b in zip([*mine.buffers(), *mine.parameters()], [*plain.buffers(), *plain.parameters()], strict=True):
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-10)
    planned_since(before, 1)


@every_plan
def test_a_region_inside_a_model_that_is_not_checkpointed_is_right(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        before = torch.asinh(x @ w) * 2
        inside = checkpoint(region, before, w, use_reentrant=False)
        return (torch.asinh(inside @ w) * before).exp()

    assert_like_eager(run, inputs, plan, graphs=1)
    seen = runs_of_a_backward(compiled(run, plan))
    assert plan in BUDGETS or (seen["aten.erf"], seen["aten.sinh"]) == (1, 1)


@three_plans
def test_eager_checkpointing_around_a_compiled_block_is_right_at_two_sizes(plan: str) -> None:
    # The list of saved values must not depend on the run: eager mode compares the two runs' lists.
    block = compiled(region, plan)
    for rows in (6, 4, 6, 5):
        results = []
        for fn in (block, region):
            x, w = leaf(rows, 6, seed=rows), leaf(6, 6, seed=1)
            checkpoint(fn, x, w, use_reentrant=False).cos().sum().backward()
            results.append([x.grad, w.grad])
        torch.testing.assert_close(results[0], results[1])


@pytest.mark.inductor
def test_orders_hold_under_inductor() -> None:
    for context, expected in ((MUST_SAVE, {0: 1, 1: 1}), (MUST_RECOMPUTE, {0: 2, 1: 2})):
        torch._dynamo.reset()
        run = two_blocks(context)
        mine = compiled(run, "min", inner="inductor")
        assert runs_of_a_step(mine) == expected
        same(step(mine, inputs()), step(run, inputs()), 1e-6, 1e-9)
