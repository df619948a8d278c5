"""Right at every plan, kind 1: random numbers are drawn once, in the user's order, and the gradient belongs to them.

Two paths: Inductor's own (one `inductor_seeds` draw, everything else computed from it), and `fallback_random=True`,
where the operators draw from the global generator as in eager mode, number for number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from remat import ops
from tests.everywhere import (
    assert_like_the_whole_joint_graph,
    compiled,
    decisions,
    every_plan,
    flat,
    leaf,
    step,
)

Program = Callable[..., Any]
both_paths = pytest.mark.parametrize("fallback_random", [False, True], ids=["seeds", "fallback"])


def programs(*found: Program) -> Any:
    """One case for each function, named after it."""
    return pytest.mark.parametrize("program", found, ids=lambda fn: fn.__name__)


def pair() -> tuple[Tensor, Tensor]:
    return leaf(8, 12, seed=1), leaf(8, 12, seed=2)


# --- what is drawn, operator by operator ---------------------------------------------------------------------------


def noise(x: Tensor, w: Tensor) -> Tensor:
    y = torch.tanh(x * w + torch.rand_like(x)) * torch.randn_like(w).exp()
    y = y * (torch.normal(torch.zeros_like(x), torch.ones_like(x)) + torch.empty_like(x).uniform_(-1, 1))
    return (F.gumbel_softmax(y * w, tau=0.7) * torch.empty_like(x).exponential_()).cos() * w


def integers(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.randint(0, 8, (20,))
    chosen = torch.multinomial(w.detach().softmax(1), 5)
    order = torch.randperm(12)
    y = x[rows] * w[rows].exp()
    return (y * y)[:, order].sin().sum() + torch.exp(x.gather(1, chosen) * w.gather(1, chosen)).sum()


def masks(x: Tensor, w: Tensor) -> Tensor:
    keep = torch.bernoulli(torch.sigmoid(x.detach()))
    y = torch.cos(F.dropout(torch.exp(x * w * 0.3), 0.4, True)) * keep
    z = F.rrelu(y * w, 0.1, 0.4, training=True)
    return F.alpha_dropout(z.exp(), 0.2, True) * F.dropout1d(w.sin(), 0.5, True) * torch.bernoulli(w.detach(), 0.6)


def attention(x: Tensor, w: Tensor) -> Tensor:
    """Dropout inside the operator, which then is plain mathematics on a CPU, and after the fused one."""
    q, k, v = (part.reshape(2, 2, 4, 6).sin() for part in (x, w, x * w))
    first = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    return torch.exp(first) * F.dropout(F.scaled_dot_product_attention(q, first, v), 0.3, True)


@every_plan
@both_paths
@programs(noise, integers, masks, attention)
def test_gradient_belongs_to_what_the_forward_drew(plan: str, fallback_random: bool, program: Program):
    """To the bit that of the unpartitioned joint graph, run from the generator's state at the forward."""
    assert_like_the_whole_joint_graph(program, pair, plan, fallback_random=fallback_random)


def masked(x: Tensor, w: Tensor) -> Tensor:
    """Ones are what dropout took; the rest tells the gradient."""
    return torch.cos(F.dropout(torch.exp(x * w), 0.5, True))


def gradient_of_masked(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """What x's gradient must be, the mask read off the output."""
    kept = ((y - 1).abs() > 1e-9).double() * 2
    assert 0.25 < (kept > 0).double().mean() < 0.75
    before = torch.exp(x * w)
    return -torch.sin(before * kept) * kept * before * w


@every_plan
@both_paths
def test_dropout_gradient_belongs_to_the_mask_seen_in_the_output(plan: str, fallback_random: bool):
    mine = compiled(masked, plan, fallback_random=fallback_random)
    for _ in range(2):
        x, w = pair()
        y = mine(x, w)
        torch.rand(7)  # the stream moves on between forward and backward
        y.sum().backward()
        torch.testing.assert_close(x.grad, gradient_of_masked(x.detach(), w.detach(), y.detach()))


# --- several draws, several calls ----------------------------------------------------------------------------------


def equal_shapes(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Draws that differ in nothing but their turn."""
    ones = torch.ones_like(x)
    first, second = torch.rand_like(x), torch.rand_like(x)
    dropped = [F.dropout(ones * 2, 0.5, True) for _ in range(2)]
    y = torch.sin(x * first) * torch.cos(w * second) * dropped[0].exp() * dropped[1].cos() * x
    return y, first, second, *dropped


@every_plan
@both_paths
def test_draws_of_equal_shape_are_different_and_so_are_calls_and_the_seed_decides(plan: str, fallback_random: bool):
    mine = compiled(equal_shapes, plan, fallback_random=fallback_random)
    mine(*pair())  # what compilation itself draws is no part of the stream
    torch.manual_seed(3)
    once = mine(*pair())
    again = mine(*pair())
    torch.manual_seed(3)
    repeated = mine(*pair())
    for a, b in ((once[1], once[2]), (once[3], once[4]), (once[1], again[1]), (once[3], again[3]), (once[0], again[0])):
        assert not torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(once, repeated, strict=True))


# --- eager's numbers, order and generator ----------------------------------------------------------------------------


def seeded() -> tuple[Tensor, Tensor]:
    torch.manual_seed(11)
    return pair()


class ForTheGradient(torch.autograd.Function):
    """Draws in the forward what only the backward uses, before another draw that the forward does use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        loud = torch.rand(3, dtype=x.dtype)
        chosen = torch.multinomial(torch.sigmoid(x), 4)
        ctx.save_for_backward(chosen)
        return x * 2 + loud.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (chosen,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(1, chosen, gradient.gather(1, chosen))


class InTheBackward(torch.autograd.Function):
    """Draws in the backward, as stochastic rounding of gradients does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.rand_like(gradient) * torch.rand(gradient.shape, dtype=gradient.dtype)


def mixed_draws(x: Tensor, w: Tensor) -> Tensor:
    a = torch.rand_like(x) * x
    b = torch.randn_like(w) * w.exp()
    rows = torch.randint(0, 8, (5,))
    c = torch.randperm(12) * a.cos()
    return (b * c)[rows] * torch.rand(5, 1, dtype=x.dtype) * x[torch.multinomial(torch.ones(8), 5)]


def drawn_for_the_gradient(x: Tensor, w: Tensor) -> Tensor:
    return ForTheGradient.apply(torch.sin(x * w)).exp() * torch.rand_like(w)


def drawn_in_the_backward(x: Tensor, w: Tensor) -> Tensor:
    return InTheBackward.apply(torch.sin(x * w)) * w * torch.rand_like(w)


def trace_of(fn: Program) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients; the generator's states after the forward, the forward again, and the first backward."""
    x, w = seeded()
    y = fn(x, w)
    states = [torch.get_rng_state()]
    fn(x, w)
    states.append(torch.get_rng_state())
    y.sum().backward()
    return [y.detach(), x.grad, w.grad], [*states, torch.get_rng_state()]


@every_plan
@programs(mixed_draws, drawn_for_the_gradient, drawn_in_the_backward)
def test_fallback_random_gives_eagers_numbers_and_leaves_the_generator_where_eager_does(plan: str, program: Program):
    mine = compiled(program, plan, fallback_random=True)
    step(mine, seeded())
    for _ in range(2):
        (truth, states), (values, left) = trace_of(program), trace_of(mine)
        for a, b in zip(values, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert [torch.equal(a, b) for a, b in zip(left, states, strict=True)] == [True] * 3


@every_plan
def test_seeds_leave_the_generator_where_pytorchs_partition_does(plan: str):
    theirs = compiled(mixed_draws, "default", partitioner="torch")
    step(theirs, seeded())
    truth = trace_of(theirs)
    torch._dynamo.reset()
    mine = compiled(mixed_draws, plan)
    step(mine, seeded())
    for a, b in zip(flat(trace_of(mine)), flat(truth), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_pytorchs_own_choice_of_saved_values_may_hold_a_seed_of_many():
    assert_like_the_whole_joint_graph(drawn_in_the_backward, pair, "default", partitioner="torch")


# --- checkpointed regions --------------------------------------------------------------------------------------------


def must_recompute(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


everything_again = functools.partial(create_selective_checkpoint_contexts, must_recompute)


def ordered_again(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(masked, x, w, use_reentrant=False, context_fn=everything_again)


def several_regions(x: Tensor, w: Tensor) -> Tensor:
    """One in another, one without states, draws outside of all."""

    def outer(x: Tensor, w: Tensor) -> Tensor:
        inner = checkpoint(masked, x, w, use_reentrant=False)
        return torch.cat([inner, masked(x, w)])

    first = checkpoint(outer, x, w, use_reentrant=False)
    last = checkpoint(masked, x, w, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([first, masked(x, w), last])


@every_plan
@both_paths
@programs(ordered_again, several_regions)
def test_replay_of_a_checkpointed_region_sees_the_forwards_mask(plan: str, fallback_random: bool, program: Program):
    mine = compiled(program, plan, fallback_random=fallback_random)
    for _ in range(2):
        x, w = pair()
        y = mine(x, w)
        torch.rand(7)
        y.sum().backward()
        parts = y.detach().split(8)
        expected = sum(gradient_of_masked(x.detach(), w.detach(), part) for part in parts)
        torch.testing.assert_close(x.grad, expected)
        assert len(parts) == 1 or not torch.equal(parts[0], parts[1])


# --- counts ----------------------------------------------------------------------------------------------------------


def draws(module: fx.GraphModule) -> list[str]:
    """The operators that take numbers from the generator, by node."""
    return [node.name for node in module.graph.nodes if node.op == "call_function" and ops.draws_random_numbers(node)]


@every_plan
@both_paths
def test_each_draw_of_the_joint_graph_is_in_forward_or_backward_once(plan: str, fallback_random: bool):
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([ordered_again(x, w), masked(x, w), drawn_in_the_backward(x, w)]) * torch.randperm(12)

    with decisions() as found:
        step(compiled(fn, plan, fallback_random=fallback_random), pair())
    (decision,) = found
    drawn = draws(decision.joint.module)
    assert drawn
    assert sorted(draws(decision.partition.forward) + draws(decision.partition.backward)) == sorted(drawn)


def test_smallest_plan_keeps_the_seeds_and_computes_the_masks_again():
    """Eight bytes a seed instead of a mask an element: what Inductor's path is for."""
    with decisions() as found:
        step(compiled(masked, "min"), pair())
    (decision,) = found
    targets = [str(node.target) for node in decision.partition.backward.graph.nodes]
    assert "prims.inductor_random.default" in targets
    assert [node.name for node in decision.chosen.plan.saved if str(node.target) == "prims.inductor_seeds.default"]


# --- under Inductor ---------------------------------------------------------------------------------------------------


@pytest.mark.inductor
@both_paths
def test_under_inductor_dropout_keeps_its_mask_at_the_smallest_plan(fallback_random: bool):
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([masked(x, w), checkpoint(masked, x, w, use_reentrant=False)])

    mine = compiled(fn, "min", inner="inductor", fallback_random=fallback_random)
    for _ in range(2):
        x, w = pair()
        y = mine(x, w)
        torch.rand(7)
        y.sum().backward()
        expected = sum(gradient_of_masked(x.detach(), w.detach(), part) for part in y.detach().split(8))
        torch.testing.assert_close(x.grad, expected, rtol=1e-6, atol=1e-8)
