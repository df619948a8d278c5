"""Symbolic shapes: compound and derived sizes, data-dependent ones, sizes 0 and 1, and other sizes on a later call.

All at seven plans, op by op, against eager mode. A second size must be right without another compilation: every
test counts the summaries, one for each joint graph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from tests.everywhere import assert_like_eager, compiled, every_plan, leaf, planned_since, same, step

# Where the plan matters less: a random plan stands for all.
three_plans = pytest.mark.parametrize("plan", ["default", "min", "random0"])

Sizes = Sequence[tuple[int, ...]]


class Runs(TorchDispatchMode):
    """Counts the operators that run: around a backward, those of the compiled backward graph among them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def assert_right_at_all_sizes(
    fn: Any,
    make: Callable[..., Sequence[Any]],
    sizes: Sizes,
    plan: str,
    *,
    dynamic: bool | None = True,
    graphs: int = 1,
    marked: tuple[int, ...] = (),
    inner: str = "eager",
    rtol: float = 1e-9,
) -> list[remat.PlanSummary]:
    """A step at each of the sizes equals eager mode's; `graphs` is how many joint graphs may be compiled for them."""
    before = len(remat.summaries())
    mine = compiled(fn, plan, dynamic=dynamic, inner=inner)
    for size in sizes:
        inputs = make(*size)
        for dimension in marked:
            torch._dynamo.mark_dynamic(inputs[0], dimension)
        same(step(mine, inputs), step(fn, make(*size)), rtol, 1e-12)
    return planned_since(before, graphs)


def two(n: int, k: int) -> list[Tensor]:
    # 13 is no other size here: equal sizes are taken for the same symbol.
    return [leaf(n, k, seed=n), leaf(k, 13, seed=3)]


# --- sizes made of sizes -------------------------------------------------------------------------------------------


def compound(x: Tensor, w: Tensor) -> Tensor:
    """2 n + 1 rows, and sizes as factors."""
    rows = torch.cat([x, x[:1], x.sin()])
    return torch.tanh(rows @ w).exp().sum(0) / rows.shape[0] * x.numel()


def halves(x: Tensor, w: Tensor) -> Tensor:
    """Two parts whose sizes are divisions; a float made of a size, which cannot be saved."""
    n = x.shape[0]
    first, second = x[: n // 2], x[n // 2 :]
    total = torch.exp((first @ w) * 0.1).sum() + torch.sin(second @ w).sum() * (n - n // 2)
    return total.cos() * (1 / math.sqrt(n))


def flattened(x: Tensor, w: Tensor) -> Tensor:
    """n * 13 elements padded by n + 3, expanded n times."""
    hidden = torch.sigmoid(x @ w).reshape(-1)
    padded = F.pad(hidden, (0, x.shape[0] + 3))
    return padded.view(1, -1).expand(x.shape[0], -1).cos().mean(1)


def only_derived(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The backward sees n + 1 and 3 n rows, never a tensor of n rows."""
    column = x.detach()[:, :1]
    first = torch.tanh(torch.cat([column, column[:1]]) + w[:1])
    return first.exp(), torch.sigmoid(torch.cat([column, column, column]) + w[1:2])


def two_and_a_derived(x: Tensor, w: Tensor) -> tuple[Tensor, int]:
    """Two dynamic sizes and one derived of both, all read by the backward; the derived one is returned too."""
    count = x.shape[0] * 2 + x.shape[1]
    falling = torch.arange(count, dtype=x.dtype) / count
    weighted = torch.exp(-falling[:, None, None] * torch.sigmoid(x)[None]).sum(0) @ w[: x.shape[1]]
    return weighted * x.shape[1] / x.shape[0], count


def read_by_the_backward_only(x: Tensor, w: Tensor) -> Tensor:
    """Gradients of a sum, a mean and a slice: the backward makes tensors of sizes that its values do not show."""
    return x.sum() * w.mean() + x[1:].mean(0).sum().sin() + (x.mean(1, keepdim=True) * 2).exp().mean()


@every_plan
@pytest.mark.parametrize(
    "fn", [compound, halves, flattened, only_derived, two_and_a_derived, read_by_the_backward_only]
)
def test_sizes_made_of_sizes_are_right_in_one_compilation(fn: Any, plan: str) -> None:
    assert_right_at_all_sizes(fn, two, [(6, 5), (9, 5), (17, 8), (4, 7)], plan)


@every_plan
def test_saved_integers_arrive_in_the_right_slots(plan: str) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        # Sizes of different magnitude as factors of gradients: swapping any two of them shows.
        a, b, c = x.shape[0], y.shape[0], x.shape[0] * y.shape[0] + 1
        grown = torch.cat([x, x.sin()]).sum(0) * a + torch.cat([y, y[:1]]).exp().sum(0) * b
        return torch.tanh(grown / c) * torch.arange(c, dtype=x.dtype)[:, None].cos().sum(0) * (a - b)

    assert_right_at_all_sizes(
        run, lambda a, b: [leaf(a, 4), leaf(b, 4, seed=1)], [(3, 11), (12, 5), (2, 30)], plan
    )


@three_plans
def test_integer_arguments_are_right(plan: str) -> None:
    def run(x: Tensor, scale: int, take: int) -> Tensor:
        return torch.sin(x[:take] * scale).exp() * (scale + take) / x.shape[0]

    assert_right_at_all_sizes(run, lambda n, s, t: [leaf(n, 4), s, t], [(9, 3, 5), (12, 7, 4), (20, 5, 11)], plan)


@every_plan
def test_a_float_made_of_a_size_is_made_again_not_saved(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        root = math.sqrt(x.shape[0])
        hidden = F.leaky_relu(torch.tanh(x @ w).clamp(max=root / 8), negative_slope=1 / root)
        return (hidden * (1 / root)).exp() * (x.shape[1] ** 0.5)

    (summary,) = assert_right_at_all_sizes(run, two, [(6, 5), (9, 8), (16, 4)], plan)
    symbolic = [value for value in summary.saved if value.operator in ("sym_float", "pow", "truediv", "sqrt")]
    assert not symbolic, symbolic


# --- how sizes become symbols --------------------------------------------------------------------------------------


@three_plans
def test_marked_dimensions_are_right_in_one_compilation(plan: str) -> None:
    sizes = [(8, 5), (12, 5), (3, 5)]
    assert_right_at_all_sizes(compound, two, sizes, plan, dynamic=None, marked=(0,))


@three_plans
def test_a_changed_size_is_compiled_again_once_and_then_never(plan: str) -> None:
    # torch.compile's default: the first size is taken as fixed, the second makes it a symbol.
    sizes = [(8, 5), (12, 5), (6, 5), (8, 5), (100, 5)]
    assert_right_at_all_sizes(halves, two, sizes, plan, dynamic=None, graphs=2)


@three_plans
def test_a_backward_after_other_sizes_have_come_in_between_is_right(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        return (compound(x, w) + flattened(x, w).sum()).sin()

    mine = compiled(run, plan, dynamic=True)
    sizes = [(6, 5), (9, 5), (4, 5)]
    inputs, truths = [two(*size) for size in sizes], [two(*size) for size in sizes]
    outputs, expected = [mine(*values) for values in inputs], [run(*values) for values in truths]
    for position in (1, 2, 0):
        outputs[position].sum().backward()
        expected[position].sum().backward()
    for values, truth in zip(inputs, truths, strict=True):
        for a, b in zip(values, truth, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


# --- sizes 0 and 1 -------------------------------------------------------------------------------------------------


@three_plans
def test_sizes_zero_and_one_are_right(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(x @ w).exp()
        return hidden.sum(0) + hidden.sin().sum(), torch.cat([hidden, hidden.cos()], 1)

    # 0 and 1 are always taken as fixed sizes: each its own graph, whatever is dynamic.
    sizes = [(0, 3), (1, 3), (5, 1)]
    assert_right_at_all_sizes(run, two, sizes, plan, graphs=3)


@three_plans
def test_tensors_without_elements_or_dimensions_are_right(plan: str) -> None:
    def run(x: Tensor, empty: Tensor, scalar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.sin(x).exp() * scalar.cos()
        return torch.cat([hidden, empty.exp()]), empty.tanh().sum() + scalar.exp(), hidden[:0].cos()

    assert_like_eager(run, lambda: [leaf(3, 2), leaf(0, 2), torch.tensor(0.7, requires_grad=True)], plan, graphs=1)


# --- sizes that depend on data -------------------------------------------------------------------------------------


def by_nonzero(x: Tensor, w: Tensor) -> Tensor:
    hidden = torch.tanh(x @ w)
    (rows,) = torch.nonzero(x[:, 0] > 0, as_tuple=True)
    chosen = hidden.index_select(0, rows).exp()
    return chosen.sum(0) * chosen.shape[0] + hidden.cos().sum()


def by_masks(x: Tensor, w: Tensor) -> Tensor:
    hidden = torch.sin(x @ w)
    total = hidden.exp().sum()
    for column in range(3):
        total = total + torch.tanh(hidden[hidden[:, column] > 0]).exp().sum() * (column + 1)
    return total.cos()


def by_item(x: Tensor, w: Tensor) -> Tensor:
    count = int((x[:, 0] > 0).sum().item())
    torch._check(count >= 0)
    torch._check(count <= x.shape[0])
    hidden = torch.exp(x @ w)
    return hidden.narrow(0, 0, count).sin().sum(0) * count + torch.zeros(count, 13).double().cos().sum() * hidden.mean()


@every_plan
@pytest.mark.parametrize(("fn", "dynamic"), [(by_nonzero, True), (by_masks, False), (by_item, True)])
def test_sizes_that_depend_on_data_are_right_for_other_data_too(fn: Any, dynamic: bool, plan: str) -> None:
    def make(n: int, k: int, seed: int) -> list[Tensor]:
        return [leaf(n, k, seed=seed), leaf(k, 13, seed=3)]

    with dynamo_config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        # Other data, so another size, in the same graph.
        assert_right_at_all_sizes(fn, make, [(6, 5, seed) for seed in (6, 21, 22)], plan, dynamic=dynamic)


@every_plan
def test_what_finds_a_size_runs_once_a_step(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        hidden = torch.tanh(x @ w)
        chosen = hidden[hidden[:, 0].exp() > 1].sin()
        return (chosen.exp().sum(0) * chosen.shape[0]).cos()

    with dynamo_config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        mine = compiled(run, plan)
        step(mine, two(6, 5))
        loss = mine(*two(6, 5)).sum()
        with Runs() as backward:
            loss.backward()
    # Indexing by a mask is what finds the size here; its gradient is another operator.
    finds = ("aten.index.Tensor", "aten.nonzero.default", "aten._local_scalar_dense.default")
    assert not [name for name in backward.counts if name in finds]


@three_plans
def test_a_number_read_from_data_is_right(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        factor = w.detach().abs().max().item()
        return torch.tanh(x @ w / factor).exp() * factor

    with dynamo_config.patch(capture_scalar_outputs=True):
        assert_right_at_all_sizes(run, two, [(6, 5), (6, 5)], plan, dynamic=False)


# --- under Inductor, which alone notices a symbol that nothing binds -----------------------------------------------


@pytest.mark.inductor
@pytest.mark.parametrize("plan", ["default", "min"])
def test_compound_sizes_are_bound_under_inductor(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return compound(x, w), only_derived(x, w)[1]

    assert_right_at_all_sizes(run, two, [(6, 5), (9, 5)], plan, inner="inductor", rtol=1e-6)
