"""Prices and purity of custom operators, as users register them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import remat
from remat import registry
from remat.errors import SettingError
from remat.partitioner import decide
from remat.settings import Settings
from tests import graphs
from tests.graphs import leaf


@torch.library.custom_op("rematregistry::soften", mutates_args=())
def soften(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * 2


@soften.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    (result,) = ctx.saved_tensors
    return gradient * result * (1 - result / 2)


soften.register_autograd(_backward, setup_context=_keep)
OP = torch.ops.rematregistry.soften


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def recomputed(**options: Any) -> bool:
    """Whether the operator runs again in the backward of remat's plan."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (soften(x @ w) @ w).sum()

    joint = graphs.joint_of(fn, leaf(16, 16), leaf(16, 16))
    decision = decide(joint, Settings(strict=True, **options))
    return any("soften" in str(node.target) for node in decision.chosen.plan.recomputed)


def test_an_unknown_operator_runs_once_until_it_is_registered() -> None:
    assert not recomputed(memory_weight=1000.0)
    remat.register_op(OP, recomputable=True)
    assert recomputed(memory_weight=1000.0)


@pytest.mark.parametrize("op", [OP, OP.default, soften, "rematregistry.soften", "rematregistry::soften"], ids=repr)
def test_an_operator_is_known_by_any_of_its_names(op: Any) -> None:
    remat.register_op(op, recomputable=True)
    assert registry.is_declared_pure(OP.default)


def test_its_price_decides() -> None:
    remat.register_op(OP, seconds=10.0, recomputable=True)
    assert not recomputed(memory_weight=1000.0), "ten seconds are dearer than a few bytes"
    remat.register_op(OP, seconds=lambda x: 1e-12 * x.numel(), recomputable=True)
    assert recomputed(memory_weight=1000.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), True, "1"])
def test_a_price_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(SettingError, match="a finite number >= 0"):
        remat.register_op(OP, seconds=seconds)


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(SettingError, match=r"torch.ops.mylib.norm"):
        remat.register_op("norm")


def test_registering_changes_the_key_of_the_compile_cache() -> None:
    before = remat.Partitioner().uuid()
    remat.register_op(OP, seconds=1e-5)
    assert remat.Partitioner().uuid() != before

    def price(share: float) -> Any:
        return lambda x: share * x.numel()

    keys = []
    for share in (1e-9, 1e-3, 1e-9):
        remat.register_op(OP, seconds=price(share))
        keys.append(registry.cache_key())
    assert keys[0] == keys[2] != keys[1], "a function is known by what it computes"


def test_gradients_are_right_when_it_runs_twice() -> None:
    remat.register_op(OP, recomputable=True)
    x, w = leaf(16, 16), leaf(16, 16)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (soften(x @ w) @ w).sum()

    wanted = torch.autograd.grad(fn(x, w), (x, w))
    options = {"inner": "eager", "memory_weight": 1000.0, "strict": True}
    got = torch.autograd.grad(torch.compile(fn, backend="remat", options=options)(x, w), (x, w))
    torch.testing.assert_close(got, wanted)
