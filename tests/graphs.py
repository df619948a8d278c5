"""Joint graphs to test on, each captured in a fraction of a second and without any code generation.

`joint_of(fn, *args)` stops `torch.compile` where Inductor calls its partitioner, so a graph here is what remat's
partitioner really gets: Inductor's own passes have run on it. `MODELS` names the graphs that most tests go over;
`joint(name)` captures each once per process (a JointGraph is never written: `prepare` works on a copy).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import passes
from remat.capture import joint_graph
from remat.costs import Costs
from remat.devices import CPU
from remat.joint import JointGraph
from remat.plans import Planner
from remat.rules import make_rules
from remat.settings import Settings


def joint_of(
    fn: Callable[..., Any], *args: Any, settings: Settings | None = None, dynamic: bool | None = None
) -> JointGraph:
    """The joint graph of `fn(*args)`: as captured, or, with settings, as prepared for planning under them."""
    joint = joint_graph(fn, *args, dynamic=dynamic)
    return joint if settings is None else passes.prepare(joint, settings)


def planner_of(joint: JointGraph, settings: Settings | None = None) -> Planner:
    """The planner of a captured joint graph, which is prepared first. Prices are always those of the CPU."""
    settings = settings or Settings()
    prepared = passes.prepare(joint, settings)
    return Planner(prepared, Costs(prepared, CPU, settings), make_rules(prepared, settings), settings)


# --- models: each a function that returns what to compile and its arguments --------------------------------------

Built = tuple[Callable[..., Any], tuple[Tensor, ...]]


def leaf(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random tensor that wants a gradient."""
    return torch.randn(*size, dtype=dtype, requires_grad=True)


def chain() -> Built:
    """Pointwise and matmul in turn, few enough values for brute force."""

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(torch.relu(x @ a) @ b)

    return run, (leaf(16, 8), leaf(8, 8), leaf(8, 4))


def mlp() -> Built:
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(16, 4)), (torch.randn(32, 16),)


def loss() -> Built:
    """A classifier with its loss: gathers, a scalar output, integer inputs."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def run(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model(x), target)

    return run, (torch.randn(16, 8), torch.randint(4, (16,)))


class Residual(nn.Module):
    """A pre-norm block of a transformer, without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def residual() -> Built:
    return nn.Sequential(Residual(8), Residual(8)), (torch.randn(4, 8, 8),)


class Attention(nn.Module):
    """Causal attention written out, or by torch's fused operator."""

    def __init__(self, width: int, heads: int, fused: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.fused, self.dropout = heads, fused, dropout
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.mix(x).split(width, dim=2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        else:
            scores = q @ k.transpose(-2, -1) / shape[3] ** 0.5
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            y = F.dropout(scores.masked_fill(~mask, -1e9).softmax(-1), self.dropout) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def attention() -> Built:
    return Attention(16, 2, fused=False), (torch.randn(2, 8, 16),)


def sdpa() -> Built:
    return Attention(16, 2, fused=True), (torch.randn(2, 8, 16),)


def attention_dropout() -> Built:
    return Attention(16, 2, fused=False, dropout=0.2), (torch.randn(2, 8, 16),)


def convnet() -> Built:
    """Convolution and batch norm in training: the forward writes its running statistics."""
    block = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*block, nn.MaxPool2d(2), nn.Conv2d(4, 4, 3)), (torch.randn(2, 3, 8, 8),)


def dropout() -> Built:
    block = [nn.Linear(16, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.5)]
    return nn.Sequential(*block), (torch.randn(8, 16),)


def embedding() -> Built:
    return nn.Sequential(nn.Embedding(10, 8), Residual(8), nn.Linear(8, 10)), (torch.randint(10, (2, 6)),)


def multi_output() -> Built:
    """Operators with several results, of which some are unused, some saved, some views."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.exp(x @ w)
        largest, _ = torch.topk(y, 3, dim=1)
        variance, mean = torch.var_mean(y, dim=1)
        left, right = torch.sin(y).split(4, dim=1)
        return (left * right).sum(1) * variance + mean, largest * largest

    return run, (leaf(6, 8), leaf(8, 8))


def views() -> Built:
    """A view of nearly everything: transposed, flattened, sliced, expanded, unbound, a view of a view."""

    def run(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        y = torch.tanh(x.transpose(0, 1).reshape(-1, 8) @ w).view(4, 6, 8)
        first, *others = y.unbind(0)
        z = y[1:3, ::2].permute(2, 0, 1)
        squares = (z * z).flatten(1) * scale.expand(8, 6)
        return squares.sum() + (first * others[-1].sigmoid()).mean() + y.view(24, 8)[5:].exp().sum()

    return run, (leaf(6, 4, 8), leaf(8, 8), leaf(8, 1))


def outputs() -> Built:
    """Results that the backward needs too, one that is an input, one that is a view of another, one an integer."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.sigmoid(x @ w)
        return y, y.t(), y.argmax(1), x, (y * y).exp()

    return run, (leaf(6, 8), leaf(8, 8))


def counter() -> Built:
    """A buffer that the forward reads and writes."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * y.mean(0))
            return torch.tanh(y - self.mean) * y

    return Counter(), (torch.randn(4, 8),)


def snapshot() -> Built:
    """The backward needs a buffer as it was before the forward wrote it."""

    def run(x: Tensor, buffer: Tensor) -> Tensor:
        y = torch.sin(x * (buffer * 3))
        buffer.mul_(0.5)
        return y

    return run, (leaf(4, 8), torch.randn(4, 8))


def constants() -> Built:
    """Tensors made from sizes alone, read by the backward: never to be saved."""

    def run(x: Tensor) -> Tensor:
        positions = torch.arange(8, dtype=torch.float32)
        angles = positions[:, None] * torch.exp(-positions / 8)
        return (torch.sin(x) * torch.cos(angles)).cumsum(0) * torch.eye(8)

    return run, (leaf(8, 8),)


def bottleneck() -> Built:
    """Wide values between narrow ones: where a plan can win most."""

    def run(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(torch.exp(-x @ up)) @ down
        return x

    return run, (leaf(16, 4), leaf(4, 64), leaf(64, 4))


MODELS: dict[str, Callable[[], Built]] = {
    builder.__name__: builder
    for builder in (
        chain, mlp, loss, residual, attention, sdpa, attention_dropout, convnet, dropout, embedding, multi_output,
        views, outputs, counter, snapshot, constants, bottleneck,
    )
}


@functools.cache
def joint(name: str) -> JointGraph:
    """The captured joint graph of one of `MODELS`; the same weights and inputs in every process."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        fn, args = MODELS[name]()
        return joint_of(fn, *args)


@functools.cache
def planner(name: str, settings: Settings | None = None) -> Planner:
    """The planner of one of `MODELS` under some settings; plans and prices are derived from it and never change it."""
    return planner_of(joint(name), settings)
