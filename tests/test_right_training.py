"""Training habits: what people do around a model must not notice that remat compiled it.

`train` runs the same loop over an eager model and its compiled twin and compares losses, gradients, parameters and
buffers after every step. At seven plans, op by op.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from tests.everywhere import PLANS, assert_like_eager, compiled, every_plan, leaf, planned_since, same, step

# Where the plan matters less: a random plan stands for all.
three_plans = pytest.mark.parametrize("plan", ["default", "min", "random0"])

Step = Callable[[Any, nn.Module, torch.optim.Optimizer, int], Tensor]


class Net(nn.Module):
    """Linear layers, a norm, statistics; with `breaks`, a graph break in the middle."""

    def __init__(self, breaks: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.breaks = breaks
        self.first, self.second = nn.Linear(6, 12, dtype=dtype), nn.Linear(12, 6, dtype=dtype)
        self.norm, self.statistics = nn.LayerNorm(12, dtype=dtype), nn.BatchNorm1d(12, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.first(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(self.statistics(hidden.exp())) + x.sin()


def data(index: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return leaf(5, 6, seed=50 + index, dtype=dtype, grad=False)


def plain_step(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
    optimizer.zero_grad()
    loss = (run(data(index)) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(
    make: Callable[[], nn.Module],
    plan: str,
    one: Step = plain_step,
    *,
    steps: int = 3,
    graphs: int = 1,
    rtol: float = 1e-7,
    atol: float = 1e-9,
    **options: Any,
) -> None:
    """Train an eager model and its compiled twin side by side; everything agrees after every step."""
    model = make()
    twin = copy.deepcopy(model)
    before = len(remat.summaries())
    run = compiled(twin, plan, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    for index in range(steps):
        truth, got = one(model, model, optimizers[0], index), one(run, twin, optimizers[1], index)
        torch.testing.assert_close(got, truth, rtol=rtol, atol=atol)
        for (name, a), b in zip(twin.state_dict().items(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
        for a, b in zip(twin.parameters(), model.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=rtol, atol=atol)
    planned_since(before, graphs)


# --- the loop around the model -------------------------------------------------------------------------------------


@three_plans
def test_gradient_accumulation_and_clipping_are_right(plan: str) -> None:
    def one(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
        optimizer.zero_grad()
        for part in range(3):
            ((run(data(3 * index + part)) ** 2).mean() / 3).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return norm

    train(Net, plan, one)


@three_plans
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_gradient_scaler_is_right(plan: str, dtype: torch.dtype) -> None:
    scaler: dict[int, Any] = {}

    def one(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
        scale = scaler.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            out = run(data(index, torch.float32))
        assert out.dtype == torch.float32  # the sum with the input, which is no product
        loss = (out**2).mean()
        scale.scale(loss).backward()
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scale.step(optimizer)
        scale.update()
        return loss.detach()

    train(lambda: Net(dtype=torch.float32), plan, one, rtol=0.05, atol=0.02)
    assert len({scale.get_scale() for scale in scaler.values()}) == 1


@every_plan
def test_autocast_inside_the_model_keeps_its_types_and_bits(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = torch.tanh(x @ w)
            with torch.autocast("cpu", enabled=False):
                exact = torch.exp(hidden.float() @ w)
            return (exact @ w).float().sin() + hidden

    before = len(remat.summaries())
    # Against the joint graph itself, to the bit: the casts are in it, and whoever moves a node moves its type.
    mine = compiled(run, plan, check=True, check_tolerance=0.0)
    for _ in range(2):
        step(mine, [leaf(5, 8, dtype=torch.float32), leaf(8, 8, seed=1, dtype=torch.float32)])
    planned_since(before, 1)


@three_plans
def test_switching_autocast_modes_and_grad_around_one_model_is_right(plan: str) -> None:
    model = Net(dtype=torch.float32)
    twin = copy.deepcopy(model)
    run = compiled(twin, plan)
    x = data(0, torch.float32)
    before = len(remat.summaries())
    for cast in (False, True, False):
        results = []
        for fn, module in ((model, model), (run, twin)):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                out = fn(x)
            out.float().square().sum().backward()
            results.append([out, *(p.grad for p in module.parameters())])
        tolerance = 0.1 if cast else 1e-4
        torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)
    planned_since(before, 2)
    twin.load_state_dict(model.state_dict())
    for context in (torch.no_grad(), torch.inference_mode(), torch.set_grad_enabled(False)):
        with context:
            model.eval(), twin.eval()
            out = run(x)
            assert not out.requires_grad
            torch.testing.assert_close(out, model(x))
    model.train(), twin.train()
    with torch.set_grad_enabled(True):
        assert run(x).requires_grad
    planned_since(before, 2)


@three_plans
def test_train_and_eval_in_turn_are_right(plan: str) -> None:
    def one(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
        model.train(index % 2 == 0)
        return plain_step(run, model, optimizer, index)

    # One graph for each mode.
    train(Net, plan, one, steps=4, graphs=2)


# --- graphs that live on, or meet ----------------------------------------------------------------------------------


def function(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(x @ w).exp() @ w, -1)


def pair(seed: int = 0) -> list[Tensor]:
    return [leaf(5, 6, seed=seed), leaf(6, 6, seed=seed + 1)]


@every_plan
def test_two_backwards_of_a_retained_graph_are_right(plan: str) -> None:
    mine = compiled(function, plan)
    for _ in range(2):
        results = []
        for fn in (function, mine):
            inputs = pair()
            out = fn(*inputs)
            out.sin().sum().backward(retain_graph=True)
            once = [value.grad.clone() for value in inputs]
            (out**2).sum().backward(retain_graph=True)
            out.exp().sum().backward()
            results.append([*once, *(value.grad for value in inputs)])
        torch.testing.assert_close(results[1], results[0])


@three_plans
def test_a_second_backward_of_a_freed_graph_is_an_error(plan: str) -> None:
    loss = compiled(function, plan)(*pair()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@every_plan
def test_graphs_alive_at_once_do_not_mix(plan: str) -> None:
    mine = compiled(function, plan)
    results = []
    for fn in (function, mine, mine):
        batches = [pair(seed) for seed in (0, 10, 20)]
        outputs = [fn(*inputs) for inputs in batches]
        # Not in the order of the forwards, one of them twice, and two within one loss.
        outputs[1].sin().sum().backward(retain_graph=True)
        (outputs[2] * outputs[0]).sum().backward()
        outputs[1].exp().sum().backward()
        chained = fn(fn(*pair(3)), batches[0][1])
        chained.sum().cos().backward()
        results.append([value.grad for inputs in batches for value in inputs])
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@three_plans
def test_double_backward_is_refused_clearly(plan: str) -> None:
    x, w = pair()
    out = compiled(function, plan)(x, w).square().sum()
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    expected = torch.autograd.grad(function(x, w).square().sum(), x)[0]
    torch.testing.assert_close(first, expected)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


@three_plans
def test_a_gradient_penalty_outside_the_compiled_part_is_right(plan: str) -> None:
    def run(part: Any, x: Tensor, w: Tensor) -> list[Tensor]:
        out = part(x, w)
        tail = (out.detach().requires_grad_() ** 3).sum()
        return [*torch.autograd.grad((out * 2).sum() + tail.detach(), (x, w))]

    mine = compiled(function, plan)
    for _ in range(2):
        torch.testing.assert_close(run(mine, *pair()), run(function, *pair()))


# --- what is compiled ----------------------------------------------------------------------------------------------


@three_plans
def test_graph_breaks_make_several_graphs_all_planned(plan: str) -> None:
    train(lambda: Net(breaks=True), plan, graphs=2)


@three_plans
def test_several_instances_train_independently(plan: str) -> None:
    models = [Net(), Net(breaks=True), Net()]
    twins = copy.deepcopy(models)
    runs = [compiled(twin, plan) for twin in twins]
    optimizers = [[torch.optim.SGD(m.parameters(), lr=0.1) for m in group] for group in (models, twins)]
    for index in range(2):
        for position in (2, 0, 1):
            truth = plain_step(models[position], models[position], optimizers[0][position], index)
            got = plain_step(runs[position], twins[position], optimizers[1][position], index)
            torch.testing.assert_close(got, truth)
    for model, twin in zip(models, twins, strict=True):
        torch.testing.assert_close(dict(twin.state_dict()), dict(model.state_dict()))


class Tied(nn.Module):
    """An embedding that is the last layer's weight too, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6, dtype=torch.float64)
        self.middle, self.frozen = nn.Linear(6, 6, dtype=torch.float64), nn.Linear(6, 6, dtype=torch.float64)
        self.last = nn.Linear(6, 7, bias=False, dtype=torch.float64)
        self.last.weight = self.table.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        index = (x.abs() * 3).long() % 7
        return self.last(torch.tanh(self.frozen(self.middle(self.table(index)).exp()))).sum(1)


@every_plan
def test_tied_and_frozen_weights_are_right(plan: str) -> None:
    train(Tied, plan)


@three_plans
def test_freezing_and_thawing_layers_is_right(plan: str) -> None:
    def one(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
        model.first.requires_grad_(index != 1)
        return plain_step(run, model, optimizer, index)

    train(Net, plan, one, steps=4, graphs=2)


@three_plans
def test_a_compiled_submodule_and_a_compiled_loss_are_right(plan: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Net(), nn.Linear(6, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x).tanh()).exp()

    model = Outer()
    twin = copy.deepcopy(model)
    before = len(remat.summaries())
    twin.inner = compiled(twin.inner, plan, epilogue_fusion=True)
    loss = compiled(lambda out: (out**2).logsumexp(0).mean(), plan)
    for index in range(2):
        model.zero_grad(), twin.zero_grad()
        (model(data(index)) ** 2).logsumexp(0).mean().backward()
        loss(twin(data(index))).backward()
        for a, b in zip(twin.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    planned_since(before, 2)


@every_plan
def test_fullgraph_with_a_loss_inside_is_right(plan: str) -> None:
    def run(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(function(x, w).log(), target, label_smoothing=0.1)

    before = len(remat.summaries())
    options = {"inner": "eager", "strict": True, **PLANS[plan]}
    mine = torch.compile(run, backend="remat", fullgraph=True, options=options)
    for _ in range(2):
        inputs = [[*pair(), torch.tensor([0, 1, 5, 3, 2])] for _ in range(2)]
        same(step(mine, inputs[1]), step(run, inputs[0]), 1e-9, 1e-12)
    planned_since(before, 1)


@three_plans
def test_setting_grad_mode_inside_the_function_is_right(plan: str) -> None:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(x @ w)
        torch.set_grad_enabled(False)
        level = hidden.exp().mean()
        torch.set_grad_enabled(True)
        with torch.no_grad():
            scale = (hidden - level).abs().amax()
        return (hidden * level / scale).sin(), level

    assert_like_eager(run, pair, plan)


# --- long graphs ---------------------------------------------------------------------------------------------------


def lattice(x: Tensor) -> Tensor:
    """28 values, each updated from its neighbours, three times (pytorch#145081)."""
    values = [x * (1 + i / 28) for i in range(28)]
    for _ in range(3):
        values = [torch.tanh(values[i - 1] + values[i] * values[(i + 1) % 28]) for i in range(28)]
    return torch.stack(values).sum(0)


def ladder(x: Tensor) -> Tensor:
    """300 steps, each from the two before it: more paths than could ever be listed."""
    before, last = x, x.sin()
    for _ in range(300):
        before, last = last, torch.tanh(last * 0.5 + before.cos())
    return last


@pytest.mark.parametrize(("fn", "plan"), [(lattice, "default"), (lattice, "random0"), (ladder, "default")])
def test_graphs_with_countless_paths_are_planned_in_seconds_and_right(fn: Any, plan: str) -> None:
    (summary,) = assert_like_eager(fn, lambda: [leaf(4)], plan, graphs=1, steps=1, rtol=1e-6)
    assert summary.nodes > 500
    assert summary.decision_seconds < 15


@pytest.mark.inductor
def test_retained_graphs_are_right_under_inductor() -> None:
    mine = compiled(function, "min", inner="inductor")
    results = []
    for fn in (function, mine):
        batches = [pair(seed) for seed in (0, 10)]
        outputs = [fn(*inputs) for inputs in batches]
        outputs[1].sin().sum().backward(retain_graph=True)
        outputs[0].sum().cos().backward()
        outputs[1].exp().sum().backward()
        results.append([value.grad for inputs in batches for value in inputs])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-9)
