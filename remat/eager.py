"""Run a graph op by op, without Inductor: for debugging, and where memory must be exact.

Inductor's random operators compute from a seed that is an argument; their stock kernels ignore it and draw from the
global generator, so that two calls give two results. Here they are run seed-true.
"""

from __future__ import annotations

import operator
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


class OpByOp:
    """A graph as a list of calls, each value dropped right after its last use, as eager mode does.

    fx.Interpreter keeps values that nothing uses, and all that is left in its environment until the next run.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.inputs = module.graph.find_nodes(op="placeholder")
        self.output = module.graph.output_node()
        self.calls = [node for node in module.graph.nodes if node.op == "call_function"]
        self.constants = {
            node: operator.attrgetter(str(node.target))(module) for node in module.graph.find_nodes(op="get_attr")
        }
        last: dict[fx.Node, fx.Node] = {}
        for node in (*self.calls, self.output):
            last.update(dict.fromkeys((node, *node.all_input_nodes), node))
        self.dropped: dict[fx.Node, list[fx.Node]] = {node: [] for node in self.calls}
        for value, user in last.items():
            if user is not self.output and value not in self.constants:
                self.dropped[user].append(value)
        self.unused = [node for node in self.inputs if node not in last]

    def __call__(self, arguments: list[Any]) -> Any:
        """Run; empties the list of arguments, so that each can be freed after its last use."""
        values: dict[fx.Node, Any] = {**dict(zip(self.inputs, arguments, strict=True)), **self.constants}
        arguments.clear()
        for node in self.unused:
            del values[node]
        for node in self.calls:
            target = SEED_TRUE.get(node.target, node.target)
            positional, named = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = target(*positional, **named)
            del positional, named
            for value in self.dropped[node]:
                del values[value]
        return fx.map_arg(self.output.args[0], values.__getitem__)


def compile_op_by_op(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A boxed callable over the graph, in AOTAutograd's sense."""
    program = OpByOp(module)

    def run(arguments: list[Any]) -> Any:
        with torch.no_grad():
            return program(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
