"""A joint graph traced on the CPU as one for another device: what a GPU would be given to plan and to lower.

Tracing autograd on fake CUDA tensors aborts the process, and attention traced on the meta device has a buffer that no
GPU would allocate; so models are traced on the CPU, and the attention operators that only a CPU has become the ones
that CUDA would have taken: flash in half precision without a mask, memory-efficient otherwise.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from remat import torch_internals, torch_internals_gpu
from remat.errors import UnsupportedGraph
from remat.joint import JointGraph

aten = torch.ops.aten
FORWARD: Final = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD: Final = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def retarget(joint: JointGraph, device: torch.device) -> JointGraph:
    """The same computation on another device, every node's value as it is there. The graph given is left as it was.

    Raises UnsupportedGraph where an operator cannot run there.
    """
    move = _Move(device)
    for node in joint.module.graph.nodes:
        move.copy(node)
    return replace(joint, module=torch_internals.make_module(joint.module, move.graph))


class _Move:
    """Writes the new graph, node by node, under the old names."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node) -> None:
        """One node; what it computes is looked up for the device, sizes and strides included."""
        if node.op in ("placeholder", "get_attr", "output"):
            made = self.graph.node_copy(node, self.new.__getitem__)
            # A constant stays where it is: a number that a kernel takes as such.
            if "val" in node.meta and node.op != "get_attr":
                made.meta["val"] = torch_internals_gpu.moved(node.meta["val"], self.device)
        elif node.target is FORWARD:
            made = self._attention(node)
        elif node.target is BACKWARD:
            made = self._attention_backward(node)
        else:
            arguments = self._moved_arguments(node)
            made = self._made(node, node.target, *arguments)
        self.new[node] = made

    def _moved_arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def move(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self.new[value]
            return self.device if isinstance(value, torch.device) else value

        moved: Any = fx.node.map_aggregate((node.args, node.kwargs), move)
        return moved[0], dict(moved[1])

    def _made(self, old: fx.Node, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> fx.Node:
        made = self.graph.create_node("call_function", target, arguments, keywords, name=old.name)
        made.meta = dict(old.meta)
        try:
            made.meta["val"] = torch_internals_gpu.run_on_fakes(made)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedGraph(f"{old.name} ({target}) cannot run on {self.device}: {error}") from error
        return made

    # --- attention ---------------------------------------------------------------------------------------------

    def _attention(self, node: fx.Node) -> fx.Node:
        asked = self._asked(node)
        query, key, value, mask = (asked[name] for name in ("query", "key", "value", "attn_mask"))
        dropout, causal, scale = (asked[name] for name in ("dropout_p", "is_causal", "scale"))
        arguments: tuple[Any, ...]
        if _is_flash(query, mask):
            target, arguments = aten._scaled_dot_product_flash_attention.default, (query, key, value, dropout, causal)
        else:
            target = aten._scaled_dot_product_efficient_attention.default
            arguments = (query, key, value, mask, True, dropout, causal)
        return self._made(node, target, arguments, {"scale": scale})

    def _attention_backward(self, node: fx.Node) -> fx.Node:
        asked = self._asked(node)
        named = ("grad_out", "query", "key", "value", "out", "logsumexp", "attn_mask")
        gradient, query, key, value, out, logsumexp, mask = (asked[name] for name in named)
        forward = logsumexp.args[0]
        assert isinstance(forward, fx.Node)
        arguments: tuple[Any, ...]
        dropout, causal, scale = (asked[name] for name in ("dropout_p", "is_causal", "scale"))
        if _is_flash(query, mask):
            # Dense batches have no cumulative lengths; the longest sequences are numbers in a traced graph.
            results = forward.meta["val"]
            seed, offset = self._item(forward, 6), self._item(forward, 7)
            lengths = (None, None, results[4], results[5])
            arguments = (gradient, query, key, value, out, logsumexp, *lengths, dropout, causal, seed, offset)
            target = aten._scaled_dot_product_flash_attention_backward.default
        else:
            seed, offset = self._item(forward, 2), self._item(forward, 3)
            wanted = [True, True, True, False]
            arguments = (gradient, query, key, value, mask, out, logsumexp, seed, offset, dropout, wanted, causal)
            target = aten._scaled_dot_product_efficient_attention_backward.default
        return self._made(node, target, arguments, {"scale": scale})

    def _asked(self, node: fx.Node) -> dict[str, Any]:
        """An operator's arguments by name, defaults filled in, nodes as they are in the new graph."""
        assert isinstance(node.target, torch._ops.OpOverload)
        found = {}
        for place, argument in enumerate(node.target._schema.arguments):
            given = node.args[place] if place < len(node.args) else argument.default_value
            value = node.kwargs.get(argument.name, given)
            found[argument.name] = self.new[value] if isinstance(value, fx.Node) else value
        return found

    def _item(self, attention: fx.Node, index: int) -> fx.Node:
        """A result of an operator that the CPU's does not have, right behind it."""
        for user in attention.users:
            if user.args == (attention, index):
                return user
        with self.graph.inserting_after(attention):
            item = self.graph.call_function(operator.getitem, (attention, index))
        item.meta = {**attention.meta, "val": attention.meta["val"][index]}
        return item


def _is_flash(query: fx.Node, mask: Any) -> bool:
    return mask is None and query.meta["val"].dtype in (torch.float16, torch.bfloat16)
