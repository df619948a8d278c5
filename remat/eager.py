"""Run a graph op by op, without Inductor: for debugging, and where memory must be exact.

Inductor's random operators compute from a seed that is an argument; their stock kernels ignore it and draw from the
global generator, so that two calls give two results. Here they are run seed-true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx

prims = torch.ops.prims


def _generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(device=seed.device).manual_seed(int(seed))


def _random(
    size: Sequence[int], seed: torch.Tensor, mode: str, *, align_dtype: torch.dtype | None = None
) -> torch.Tensor:
    draw: Callable[..., torch.Tensor] = {"rand": torch.rand, "randn": torch.randn}[mode]
    return draw(size, generator=_generator(seed), device=seed.device, dtype=torch.float32)


def _randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    return torch.randint(low, high, size, generator=_generator(seed), device=seed.device)


SEED_TRUE: Final[dict[Any, Callable[..., Any]]] = {
    prims.inductor_random.default: _random,
    prims.inductor_randint.default: _randint,
}


class OpByOp(fx.Interpreter):
    """Interpreter that frees each value after its last use, as eager mode does, and honours seeds."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator."""
        return super().call_function(SEED_TRUE.get(target, target), args, kwargs)


def compile_op_by_op(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A boxed callable over the graph: it empties the list of arguments it is given, so that they can be freed."""
    interpreter = OpByOp(module)

    def run(arguments: list[Any]) -> Any:
        with torch.no_grad():
            return interpreter.boxed_run(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
