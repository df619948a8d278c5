"""Right at every plan, kind 2: in-place writes on activations, buffers, inputs, and what the backward writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from tests.everywhere import (
    assert_like_eager,
    compiled,
    decisions,
    every_plan,
    flat,
    leaf,
    planned_since,
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
    y.add_(1).relu_().mul_(w.sum())
    z = torch.sin(y)
    y.exp_()
    return z * y


def indexed_writes(x: Tensor, w: Tensor) -> Tensor:
    y = torch.tanh(x @ w)
    z = y.clone()
    z[1:3] = 0.5
    z[:, 2] *= x[:, 2]
    z[torch.tensor([0, 5])] += w[0]
    z.masked_fill_(x > 1, -1.0)
    z.index_add_(0, torch.tensor([1, 1]), x[:2])
    return z.cos() * y


def writes_to_views(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A write to a view shows in its base and in the other views, and the gradient knows it."""
    y = torch.sin(x @ w)
    rows, flattened = y[2:], y.view(-1)
    rows.mul_(3)
    flattened[:7].add_(1)
    y.t().diagonal().mul_(x[:6, 0])
    return y.exp(), rows.cos() * flattened[12:].view(4, 6)


def write_into_fresh_memory(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros(6, 12, dtype=x.dtype)
    out[:, :6].copy_(x @ w)
    out[:, 6:] = torch.exp(out[:, :6] * 0.1)
    return torch.tanh(out) * out


def detached_write(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What the write changes is the memory of both; the gradient flows as if there were no detach."""
    y = (x @ w) * 2
    kept = torch.cos(y)
    y.detach().mul_(0.5)
    return kept, y * w


def data_write(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    y.data.clamp_(min=-0.5)
    return y * w


@every_plan
@programs(chain_of_writes, indexed_writes, writes_to_views, write_into_fresh_memory, detached_write, data_write)
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
    "itself": lambda buffer: buffer * 1,
    "clone": lambda buffer: buffer.clone(),
    "pointwise": lambda buffer: (buffer * 3).sqrt(),
    "view": lambda buffer: buffer.view(4, 4).t().reshape(-1) + 0,
    "slice": lambda buffer: buffer[3:4],
    "sum": lambda buffer: buffer.sum(),
    "cast": lambda buffer: buffer.float().double(),
    "items": lambda buffer: buffer.view(2, 8).max(0)[0].repeat(2),
    "like": lambda buffer: torch.full_like(buffer, 2.0) + torch.zeros_like(buffer),
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


def view_for_the_backward(x: Tensor, buffer: Tensor) -> Tensor:
    """The gradient reads a view of the argument and nothing else of it."""
    y = x @ buffer.t()
    buffer.zero_()
    return y


def chained(x: Tensor, buffer: Tensor) -> Tensor:
    a = buffer + 1
    buffer.add_(1)
    b = buffer * 2
    buffer.mul_(3)
    return torch.sin(x * a) * torch.cos(x * b) * buffer.clone() * x


def twice_with_reads_between(x: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.exp(x * buffer * 0.1)
    buffer.copy_(y.detach().mean(0, keepdim=True).expand_as(buffer))
    z = torch.exp(y * buffer * 0.1)
    buffer.copy_(z.detach())
    return z * buffer, y


def slice_of_argument(x: Tensor, buffer: Tensor) -> Tensor:
    k = buffer * 2
    y = torch.cos(x * k)
    buffer[1:3].add_(5)
    buffer.view(-1)[::2].mul_(k.view(-1)[::2])
    return y * buffer


def equal_reads_around_a_write(x: Tensor, buffer: Tensor) -> Tensor:
    """The same expression before and after the write is two values."""
    before = buffer.sin() * x
    buffer.copy_(buffer + 1)
    after = buffer.sin() * x
    return before.exp() * after


def filled(x: Tensor, buffer: Tensor) -> Tensor:
    y = torch.sigmoid(x * buffer)
    buffer.fill_(7)
    return y * buffer


def data_of_argument(x: Tensor, buffer: Tensor) -> Tensor:
    y = torch.sigmoid(x * buffer.exp())
    buffer.data.mul_(2)
    return y * x


@every_plan
@programs(
    only_the_backward, view_for_the_backward, chained, twice_with_reads_between, slice_of_argument,
    equal_reads_around_a_write, filled, data_of_argument,
)
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
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))
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
    assert_like_eager(Moments(), lambda: (leaf(6, 6, seed=1),), plan, steps=3)


@every_plan
def test_spectral_norm_updates_its_vectors_once_and_differentiates_at_the_new_ones(plan: str):
    torch.manual_seed(0)
    model = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4).double())
    assert_like_eager(model, lambda: (leaf(3, 5, seed=1),), plan)


class Clipped(nn.Module):
    """A parameter written by the forward, without a gradient and by `.data`."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(leaf(6, 6, seed=3).detach())
        self.by_data = by_data

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x * 0.1)
        if self.by_data:
            self.weight.data.clamp_(-0.5, 0.5)
        else:
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
        return y @ self.weight


@every_plan
@pytest.mark.parametrize("by_data", [False, True], ids=["no_grad", "data"])
def test_parameter_clipped_by_the_forward_is_differentiated_at_its_new_value(plan: str, by_data: bool):
    assert_like_eager(Clipped(by_data), lambda: (leaf(6, 6, seed=1),), plan)


# --- inputs that want gradients ------------------------------------------------------------------------------------


def made_from_leaf() -> tuple[Tensor, Tensor, Tensor]:
    """A leaf, a value made from it outside (so that it may be written), and another leaf."""
    base = leaf(6, 6, seed=1)
    return base, base * 1.5, leaf(6, 6, seed=2)


def exp_add(base: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()  # eager keeps the result of exp, never x itself
    x.add_(w)
    return y, x


def sigmoid_neg(base: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.sigmoid(x) * w.sum()
    x.neg_().add_(1)
    return y * 2, x * 1


def slice_written(base: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.sin(x * w)
    x[1:4].mul_(w[1:4])
    return y, torch.cos(x)


def view_written(base: Tensor, x: Tensor, w: Tensor) -> Tensor:
    y = torch.tanh(x.t() @ w)
    x.view(-1)[::3].zero_()
    return y * x


def overwritten(base: Tensor, x: Tensor, w: Tensor) -> Tensor:
    y = x.sigmoid() * w.exp()
    x.copy_(w)
    return y * x


def detached_then_written(base: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    before = x.detach()
    x.mul_(2)
    return x, before * w


@every_plan
@programs(exp_add, sigmoid_neg, slice_written, view_written, overwritten, detached_then_written)
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
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.forward_too = forward_too

    def forward(self, x: Tensor) -> Tensor:
        if self.forward_too:
            self.history.mul_(0.5)
            self.count.add_(10)
            x = x * (1 + self.history) * self.count
        return torch.sin(Record.apply(torch.exp(x * 0.1), self.history, self.count))


@every_plan
@pytest.mark.parametrize("forward_too", [False, True], ids=["backward_only", "forward_and_backward"])
def test_history_and_counter_written_by_the_backward_move_once_and_there(plan: str, forward_too: bool):
    model = Recorder(forward_too)
    assert_like_eager(model, lambda: (leaf(4, 6, seed=1),), plan, steps=3)
    assert int(model.count) == (33 if forward_too else 3)


@every_plan
@pytest.mark.parametrize("forward_too", [False, True], ids=["backward_only", "forward_and_backward"])
def test_what_the_backward_writes_is_not_written_before_it(plan: str, forward_too: bool):
    """Counters do not depend on any gradient: nothing but their place in the program says when they move."""
    model = Recorder(forward_too)
    mine = compiled(model, plan)
    for done in range(2):
        before = (done + 1) * 10 + done if forward_too else done
        y = mine(leaf(4, 6, seed=1))
        assert int(model.count) == before
        y.sum().backward()
        assert int(model.count) == before + 1


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


def constant_writes(x: Tensor, flag: Tensor, gain: Tensor) -> Tensor:
    return Constants.apply(torch.sin(x), flag, gain).exp()


def gradient_is_an_old_value(x: Tensor, flag: Tensor, gain: Tensor) -> Tensor:
    return Constants.apply(x, flag, gain).exp()


@every_plan
@programs(constant_writes, gradient_is_an_old_value)
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
counts = writer(lambda seen, gradient: seen.add_(1))
copies = writer(lambda seen, gradient: seen.copy_(gradient))
writes_a_row = writer(lambda seen, gradient: seen[1].add_(gradient[0]))


def added(x: Tensor) -> tuple[Tensor, Tensor]:
    seen = x.detach() * 3
    return adds(torch.sin(x), seen).exp(), seen


def multiplied(x: Tensor) -> tuple[Tensor, Tensor]:
    seen = x.detach() * 3
    return multiplies(torch.sin(x), seen).exp(), seen


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
    return adds(torch.sin(x), seen) * seen.sin() * x * seen, seen


@every_plan
@programs(added, multiplied, written_several_times, two_outputs, needed_before_the_write)
def test_returned_tensor_that_the_backward_writes_is_old_before_it_and_new_after_it(plan: str, program: Program):
    """The harness compares outputs before the backward and after it."""
    assert_like_eager(program, lambda: (leaf(5, 6, seed=1),), plan)
