"""The ways to run a model that are compared, and what remat says about the graphs that it compiled."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import remat

LossFunction = Callable[..., Tensor]
# A shorter nn.Sequential is a part of a block.
LONG = 16


@dataclass(frozen=True)
class Variant:
    """How to compile a model: `backend` None is eager; `torch_budget` is PyTorch's own memory budget.

    checkpoints: torch.utils.checkpoint on each block (see `checkpoint_blocks`).
    """

    name: str
    backend: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    torch_budget: float = 1.0
    checkpoints: bool = False

    @property
    def is_remat(self) -> bool:
        """Whether remat's backend compiles it, be it with PyTorch's partitioner inside."""
        return self.backend == "remat"

    def compile(self, model: nn.Module) -> LossFunction:
        """The model itself if eager; otherwise compiled, which happens at the first call."""
        if self.checkpoints:
            checkpoint_blocks(model)
        if self.backend is None:
            return model
        compiled = torch.compile(model, backend=self.backend, options=self.options or None)

        def call(*args: Tensor) -> Tensor:
            # The budget is a process-wide setting of torch, and is read when the joint graph is partitioned.
            with functorch_config.patch(activation_memory_budget=self.torch_budget):
                return compiled(*args)

        return call


def parse_variant(name: str, inner: str) -> Variant:
    """Read `eager`, `checkpoint`, `inductor`, `inductor-0.5`, `remat` or `remat-BUDGET`, executed by `inner`.

    `inductor` is PyTorch's own partitioner. Under `inner="eager"` it is given remat's op-by-op executor, so
    that the two differ in the partition alone. A budget of `inductor` is a fraction of saved bytes, as PyTorch
    means it; one of `remat` is a peak.
    """
    base, _, budget = name.partition("-")
    if name in ("eager", "checkpoint"):
        return Variant(name, checkpoints=name == "checkpoint")
    if base == "inductor":
        if inner == "inductor":
            return Variant(name, "inductor", torch_budget=float(budget) if budget else 1.0)
        options: dict[str, Any] = {"inner": inner, "partitioner": "torch", "strict": True}
        return Variant(name, "remat", options | ({"budget": float(budget) or "min"} if budget else {}))
    if base == "remat":
        return remat_variant(inner, budget or None, name)
    raise ValueError(f"unknown variant {name!r}; known: eager, checkpoint, inductor[-FRACTION], remat[-BUDGET]")


def remat_variant(inner: str, budget: str | None, name: str = "remat") -> Variant:
    """remat's own plan for `budget`. Strict: a graph that falls back to PyTorch's plan is an error."""
    options: dict[str, Any] = {"inner": inner, "strict": True}
    return Variant(name, "remat", options if budget is None else options | {"budget": budget})


def checkpoint_blocks(model: nn.Module) -> None:
    """Have torch.utils.checkpoint run each block of a model, in eager mode: its peer to beat.

    Blocks are the elements of the outermost lists of modules; of a long nn.Sequential, about as many segments as the
    square root of its length (Chen et al., 2016).
    """
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            for block in child:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        elif isinstance(child, nn.Sequential) and len(child) >= LONG:
            layers = list(child)
            child.forward = partial(checkpoint_sequential, layers, math.isqrt(len(layers)), use_reentrant=False)  # type: ignore[method-assign]
        else:
            checkpoint_blocks(child)


def disable_compile_caches() -> None:
    """Partition and generate code every time: what is measured is then planned and compiled here."""
    inductor_config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False


def summaries_since(count: int) -> tuple[Any, ...]:
    """remat's summaries of the graphs after the first `count`; a RuntimeError unless it planned them."""
    found = remat.summaries()[count:]
    if not found:
        raise RuntimeError("remat compiled no graph with a backward: nothing was measured")
    if unplanned := [summary for summary in found if summary.origin not in ("planned", "cached")]:
        raise RuntimeError(f"remat did not plan a graph ({unplanned[0].origin}): {unplanned[0].reason}")
    return found


def plan_fields(summaries: Sequence[Any]) -> dict[str, Any]:
    """The fields of a `Row` that come from remat's plans; graphs of one model add up, their peaks do not."""
    if not summaries:
        return {}
    totals = {
        name: sum(getattr(summary, name) for summary in summaries)
        for name in ("recomputed_flops", "recomputed_bytes", "forward_flops", "decision_seconds")
    }
    return totals | {"predicted_peak_bytes": max(summary.predicted_peak_bytes for summary in summaries)}


def plan_extra(summaries: Sequence[Any]) -> dict[str, Any]:
    """What else a row keeps of remat's plans."""
    if not summaries:
        return {}
    return {
        "origins": [summary.origin for summary in summaries],
        "recomputed_ops": sum(summary.recomputed_ops for summary in summaries),
        "predicted_saved_bytes": sum(summary.saved_bytes for summary in summaries),
        "torch_saved_bytes": sum(summary.torch_saved_bytes for summary in summaries),
    }


def budget_extra(summaries: Sequence[Any]) -> dict[str, Any]:
    """What a row keeps of plans for a budget: how near each is to the bounds."""
    peaks, totals = ("smallest_peak_bytes", "peak_bound_bytes"), (
        "nodes", "recompute_seconds", "recompute_bound_seconds", "step_seconds"
    )  # fmt: skip
    return {name: max(getattr(summary, name) for summary in summaries) for name in peaks} | {
        name: sum(getattr(summary, name) for summary in summaries) for name in totals
    }
