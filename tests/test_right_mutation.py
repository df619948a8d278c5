"""Right at every plan, kind 2: in-place writes on activations, buffers, inputs, and what the backward writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat import torch_internals
from tests.everywhere import (
    assert_like_eager,
    compiled,
    decisions,
    every_plan,
    leaf,
    same,
    step,
)

Program = Callable[..., Any]


def programs(*found: Program) -> Any:
    """One case for each function, named after it."""
    return pytest.mark.parametrize("program", found, ids=lambda fn: fn.__name__)


def plain(*size: int, seed: int = 0) -> Tensor:
    return leaf(*size, seed=seed, grad=False)


# --- activations ---------------------------------------------------------------------------------------------------


def chain_of_writes(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.add_(1).relu_()
    z = y * w.sum()
    z.sigmoid_()
    y = y * 0.1
    y.exp_()
    return z * y


def indexed_writes(x: Tensor, w: Tensor) -> Tensor:
    """By slice, index, mask, and into memory made for it."""
    y = torch.tanh(x @ w)
    z = y.clone()
    z[1:3] = 0.5
    z[:, 2] *= x[:, 2]
    z[torch.tensor([0, 5])] += w[0]
    z.masked_fill_(x > 1, -1.0)
    z.index_add_(0, torch.tensor([1, 1]), x[:2])
    out = torch.zeros(6, 12, dtype=x.dtype)
    out[:, :6].copy_(z.cos())
    out[:, 6:] = torch.exp(out[:, :6] * 0.1)
    return out * torch.cat([y, y], 1)


def writes_to_views(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A write to a view shows in its base and in the other views, and the gradient knows it."""
    y = torch.sin(x @ w)
    rows, flattened = y[2:], y.view(-1)
    rows.mul_(3)
    flattened[:7].add_(1)
    y.t().diagonal().mul_(x[:6, 0])
    return y.exp(), rows.cos() * flattened[12:].view(4, 6)


def writes_past_autograd(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """By a detached alias and by `.data`: the values change, the gradient flows as if nothing had happened."""
    y = (x @ w) * 2
    kept = torch.sigmoid(y)
    y.detach().mul_(0.5)
    z = x * 3
    z.data.clamp_(min=-0.5)
    return kept * w, y * z


@every_plan
@programs(chain_of_writes, indexed_writes, writes_to_views, writes_past_autograd)
def test_writes_to_activations_give_eagers_outputs_and_gradients(plan: str, program: Program):
    assert_like_eager(program, lambda: (leaf(6, 6, seed=1), leaf(6, 6, seed=2)), plan)


# --- buffers and arguments written by the forward -------------------------------------------------------------------


class Snapshot(nn.Module):
    """A value of a buffer is used, then the buffer is written: the gradient needs the old value."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.linspace(0.5, 2.0, 16, dtype=torch.float64))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        gain = self.read(self.buffer)
        y = torch.sin(x * gain)
        self.buffer.mul_(0.5).add_(1)
        return y * gain


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda buffer: buffer.clone(),
    "view": lambda buffer: buffer.view(4, 4).t().reshape(-1) + 0,
    "others": lambda buffer: (
        buffer.sum() * buffer.float().double() * buffer.view(2, 8).max(0)[0].repeat(2) * buffer[3:4].clone()
        + torch.full_like(buffer, 2.0)
    ),
}


@every_plan
@pytest.mark.parametrize("read", READS)
def test_gradient_uses_the_buffer_as_it_was_before_the_same_forward_wrote_it(plan: str, read: str):
    assert_like_eager(Snapshot(READS[read]), lambda: (leaf(8, 16, seed=1),), plan)


class OldGain(torch.autograd.Function):
    """The forward's result does not need the buffer; its gradient does, as the buffer was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(buffer.exp(), x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gain, x = ctx.saved_tensors
        return gradient * gain * x, None


def only_the_backward(x: Tensor, buffer: Tensor) -> Tensor:
    y = OldGain.apply(x, buffer)
    buffer.mul_(0.5)
    return y


def chained(x: Tensor, buffer: Tensor) -> Tensor:
    """The same expression before and after a write is two values."""
    a = buffer + 1
    before = buffer.sin() * x
    buffer.add_(1)
    b = buffer * 2
    after = buffer.sin() * x
    buffer.mul_(3)
    return torch.sin(x * a) * torch.cos(x * b) * buffer.clone() * before * after


def parts_of_it(x: Tensor, buffer: Tensor) -> Tensor:
    k = buffer * 2
    y = torch.cos(x * k)
    buffer[1:3].add_(5)
    buffer.view(-1)[::2].mul_(k.view(-1)[::2])
    z = y * buffer.exp()
    buffer.data.fill_(7)
    return z * x * buffer


@every_plan
@programs(only_the_backward, chained, parts_of_it)
def test_arguments_written_by_the_forward_are_read_as_they_were(plan: str, program: Program):
    assert_like_eager(program, lambda: (leaf(6, 6, seed=1), plain(6, 6, seed=2)), plan)


class Statistics(nn.Module):
    """Batch norms of the usual kinds, with a dimension of statistics each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.BatchNorm2d(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@every_plan
def test_batch_norm_moves_its_running_statistics_and_counter_once_a_step(plan: str):
    model = Statistics()
    assert_like_eager(model, lambda: (leaf(2, 2, 5, 5, seed=1),), plan, steps=3)
    assert int(model.layers[1].num_batches_tracked) == 3


class Moments(nn.Module):
    """Moving averages of a mean and of a maximum, a counter, and a ring of the latest losses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(leaf(6, 6, seed=3).detach())
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("largest", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ring", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        with torch.no_grad():
            self.count += 1
            self.mean.lerp_(y.mean(0), 1 / self.count)
            self.largest.copy_(torch.maximum(self.largest, y.abs().max()))
            self.ring.copy_(self.ring.roll(1))
            self.ring[0] = y.sum()
        return torch.tanh((y - self.mean) / self.largest) * self.ring.sum()


@every_plan
def test_averages_counters_and_rings_kept_by_the_forward_move_once_a_step(plan: str):
    assert_like_eager(Moments(), lambda: (leaf(6, 6, seed=1),), plan)


@every_plan
def test_spectral_norm_updates_its_vectors_once_and_differentiates_at_the_new_ones(plan: str):
    torch.manual_seed(0)
    model = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4).double())
    assert_like_eager(model, lambda: (leaf(3, 5, seed=1),), plan)


class Clipped(nn.Module):
    """Parameters written by the forward, without a gradient and by `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(leaf(6, 6, seed=3).detach())
        self.second = nn.Parameter(leaf(6, 6, seed=4).detach())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x * 0.1)
        with torch.no_grad():
            self.first.clamp_(-0.5, 0.5)
        self.second.data.div_(self.second.data.norm())
        return torch.tanh(y @ self.first) @ self.second


@every_plan
def test_parameters_written_by_the_forward_are_differentiated_at_their_new_values(plan: str):
    assert_like_eager(Clipped(), lambda: (leaf(6, 6, seed=1),), plan)


COUNTED = [0]


@torch.library.custom_op("right_mutation::tally", mutates_args={"buffer"})
def tally(x: Tensor, buffer: Tensor) -> Tensor:
    """A custom operator that writes its second argument and notes that it ran."""
    COUNTED[0] += 1
    buffer.add_(x.sum(0))
    return x.exp()


tally.register_fake(lambda x, buffer: torch.empty_like(x))


def tally_into_argument(x: Tensor, buffer: Tensor) -> Tensor:
    return torch.sin(x * torch.ops.right_mutation.tally(x.detach(), buffer)) * x * buffer.cos()


def tally_into_activation(x: Tensor, buffer: Tensor) -> Tensor:
    sums = x.detach()[0] * 2
    return torch.sin(x * torch.ops.right_mutation.tally(x.detach(), sums)) * x * sums.cos() * buffer


@every_plan
@programs(tally_into_argument, tally_into_activation)
def test_custom_operator_that_writes_a_tensor_runs_once_a_step(plan: str, program: Program):

    def make() -> tuple[Tensor, Tensor]:
        return leaf(6, 6, seed=1), plain(6, seed=2)

    mine = compiled(program, plan)
    truth, got = step(program, make()), step(mine, make())
    same(got, truth, 1e-9, 1e-12)
    COUNTED[0] = 0
    step(mine, make())
    assert COUNTED[0] == 1


# --- inputs that want gradients ------------------------------------------------------------------------------------


def made_from_leaf() -> tuple[Tensor, Tensor, Tensor]:
    """A leaf, a value made from it outside (so that it may be written), and another leaf."""
    base = leaf(6, 6, seed=1)
    return base, base * 1.5, leaf(6, 6, seed=2)


def exp_add(base: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()  # eager keeps the result of exp, never x itself
    x.add_(w)
    return y, x


def view_written(base: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.sigmoid(x) * w.sum()
    x[1:4].mul_(w[1:4])
    x.view(-1)[::3].zero_()
    x.neg_()
    return y * 2, x.exp() * x


def overwritten(base: Tensor, x: Tensor, w: Tensor) -> Tensor:
    y = x.sigmoid() * w.exp()
    x.copy_(w)
    return y * x


def detached_then_written(base: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    before = x.detach()
    y = x.sigmoid() * w
    x.mul_(2)
    return x, y * before.sum()


@every_plan
@programs(exp_add, view_written, overwritten, detached_then_written)
def test_input_that_wants_a_gradient_may_be_written_in_place(plan: str, program: Program):
    assert_like_eager(program, made_from_leaf, plan)


# --- writes of the backward -----------------------------------------------------------------------------------------


class Record(torch.autograd.Function):
    """Doubles; the backward keeps a history of gradients and counts its calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, history: Tensor, count: Tensor) -> Tensor:
        ctx.history, ctx.count = history, count
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.history.copy_(torch.maximum(ctx.history * 0.9, gradient.abs().amax(0)))
        ctx.count.add_(1)
        return gradient * 2, None, None


class Recorder(nn.Module):
    """A history and a counter that the backward writes, and the forward too where asked for."""

    def __init__(self, forward_too: bool) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.forward_too = forward_too

    def forward(self, x: Tensor) -> Tensor:
        if self.forward_too:
            self.history.mul_(0.5)
            self.count.add_(10)
            x = x * (1 + self.history) * (self.count + 0.5)
        return torch.sin(Record.apply(torch.exp(x * 0.1), self.history, self.count))


@every_plan
@pytest.mark.parametrize("forward_too", [False, True], ids=["backward_only", "forward_and_backward"])
def test_history_and_counter_written_by_the_backward_move_once_and_there(plan: str, forward_too: bool):
    model = Recorder(forward_too)
    assert_like_eager(model, lambda: (leaf(4, 6, seed=1),), plan)
    assert int(model.count) == (22 if forward_too else 2)


@every_plan
def test_what_the_backward_writes_is_not_written_before_it(plan: str):
    """The counter does not depend on any gradient: nothing but its place in the program says when it moves."""
    model = Recorder(forward_too=True)
    mine = compiled(model, plan)
    for done in range(2):
        y = mine(leaf(4, 6, seed=1))
        assert int(model.count) == 10 * (done + 1) + done
        y.sum().backward()
        assert int(model.count) == 10 * (done + 1) + done + 1


class Constants(torch.autograd.Function):
    """The backward writes what depends on nothing (pytorch#155242), and returns what a written buffer held before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flag: Tensor, gain: Tensor) -> Tensor:
        ctx.flag, ctx.gain = flag, gain
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        old = ctx.gain * 3
        ctx.flag.copy_(torch.zeros(6, dtype=torch.float64) + 4)
        ctx.gain.mul_(0.5)
        return old, None, None


class Exchange(torch.autograd.Function):
    """The backward exchanges two buffers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.first, ctx.second = first, second
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        old = ctx.first * 1.5
        ctx.first.copy_(ctx.second * 2.5)
        ctx.second.copy_(old)
        return gradient * 2, None, None


def gradient_is_an_old_value(x: Tensor, flag: Tensor, gain: Tensor) -> Tensor:
    return Constants.apply(torch.sin(x), flag, gain).exp()


def exchanged(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return Exchange.apply(torch.sin(x), first, second).exp()


@every_plan
@programs(gradient_is_an_old_value, exchanged)
def test_backward_reads_a_buffer_before_its_own_write_to_it(plan: str, program: Program):
    assert_like_eager(program, lambda: (leaf(6, seed=1), plain(6, seed=2), plain(6, seed=3)), plan)


def writer(write: Callable[[Tensor, Tensor], Any]) -> Any:
    """A function that hands its second argument to `write`, with the gradient, in the backward."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
            ctx.save_for_backward(seen)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            (seen,) = ctx.saved_tensors
            write(seen, gradient)
            return gradient * 2, None

    return Writes.apply


adds = writer(lambda seen, gradient: seen.add_(gradient))
multiplies = writer(lambda seen, gradient: seen.mul_(gradient))
several = writer(lambda seen, gradient: seen.add_(gradient).mul_(2).sub_(gradient.sum()))
writes_a_row = writer(lambda seen, gradient: seen[1].add_(gradient[0]))


def written_several_times(x: Tensor) -> tuple[Tensor, Tensor]:
    seen = x.detach().exp()
    return several(torch.sin(x), seen).exp(), seen


def two_outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second = x.detach() * 3, x.detach().exp()
    y = multiplies(adds(torch.sin(x), first).exp(), second)
    return first, y, second


def needed_before_the_write(x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the product needs the output as the forward made it."""
    seen = x.detach() * 3
    return adds(torch.sin(x), seen) * seen.sin() * x, seen


@every_plan
@programs(written_several_times, two_outputs, needed_before_the_write)
def test_returned_tensor_that_the_backward_writes_is_old_before_it_and_new_after_it(plan: str, program: Program):
    """The harness compares outputs before the backward and after it."""
    assert_like_eager(program, lambda: (leaf(5, 6, seed=1),), plan)


def a_view_of_it(x: Tensor) -> tuple[Tensor, Tensor]:
    seen = x.detach() * 3
    return adds(torch.sin(x), seen).exp(), seen.t()


def a_row_of_it(x: Tensor) -> tuple[Tensor, Tensor]:
    seen = x.detach() * 3
    return writes_a_row(torch.sin(x), seen).exp(), seen


@programs(a_view_of_it, a_row_of_it)
def test_writes_of_the_backward_into_returned_tensors_are_right_or_refused_by_name(program: Program):
    try:
        assert_like_eager(program, lambda: (leaf(5, 6, seed=1),), "default")
    except torch._dynamo.exc.BackendCompilerFailed as error:
        assert isinstance(error.inner_exception, remat.UnsupportedGraph)
        assert "forward output" in str(error.inner_exception)


@every_plan
def test_buffer_written_by_eager_code_before_the_backward_raises_or_gives_the_old_gradient(plan: str):
    buffer = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)

    def fn(x: Tensor) -> Tensor:
        return torch.sin(x * (buffer * 3))

    mine = compiled(fn, plan)
    for _ in range(2):
        x = leaf(4, 6, seed=1)
        y = mine(x)
        expected = torch.cos(x.detach() * buffer * 3) * buffer * 3
        buffer.add_(1)
        try:
            y.sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            torch.testing.assert_close(x.grad, expected)


# --- what the rules rest on -------------------------------------------------------------------------------------------


def test_written_inputs_are_never_saved_but_a_copy_of_them_may_be():
    with decisions() as found:
        step(compiled(Snapshot(READS["clone"]), "fewest"), (leaf(8, 16, seed=1),))
    plan = found[0].chosen.plan
    assert plan.joint.written_primals
    assert not [node.name for node in plan.saved if node in plan.joint.written_primals]
    assert [str(node.target) for node in plan.saved if node.op == "call_function"] == ["aten.clone.default"]


# --- under Inductor ---------------------------------------------------------------------------------------------------


@pytest.mark.inductor
@pytest.mark.parametrize("plan", ["default", "min"])
def test_under_inductor_the_gradient_uses_the_old_buffer(plan: str):
    with torch_internals.without_compile_caches():
        assert_like_eager(Snapshot(READS["clone"]), lambda: (leaf(8, 16, seed=1),), plan, inner="inductor")


@pytest.mark.inductor
def test_under_inductor_the_backward_may_write_a_returned_tensor():
    with torch_internals.without_compile_caches():
        assert_like_eager(two_outputs, lambda: (leaf(5, 6, seed=1),), "min", inner="inductor")
