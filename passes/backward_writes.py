"""A tensor that the forward makes and returns, and the backward writes in place: return it as it was before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from remat import ops, torch_internals
from remat.errors import UnsupportedGraph
from remat.joint import JointGraph
from remat.settings import Settings


def writes_to_forward_outputs(joint: JointGraph, settings: Settings) -> JointGraph:
    """Return such an output's value before the write, and let the backward write into its memory.

    Functionalization leaves one name for the tensor: its last value, which needs a gradient that the forward does
    not have (pytorch#172956; torch's own partitioner stops with "Node add was invalid, but is output").
    """
    late = [n for n in dict.fromkeys(joint.forward_outputs) if n in joint.tangent_closure and not ops.is_mutating(n)]
    graph, output = joint.module.graph, joint.output
    for last in late:
        first = _before_the_write(last, joint)
        with graph.inserting_before(output):
            write = graph.call_function(torch.ops.aten.copy_.default, (first, last))
        write.meta = {"val": first.meta["val"], "stack_trace": last.meta.get("stack_trace")}
        torch_internals.order_into_backward(write)
        results: list[Any] = list(joint.outputs)
        for position in range(joint.num_fwd_outputs):
            results[position] = first if results[position] is last else results[position]
        output.args = (tuple(results),)
        joint = replace(joint)
    return joint


def _before_the_write(last: fx.Node, joint: JointGraph) -> fx.Node:
    """Follow in-place operators back through their first argument, to the value that the forward made."""
    node = last
    while node in joint.tangent_closure:
        first = node.args[0] if node.args else None
        if not (isinstance(first, fx.Node) and torch_internals.was_in_place(node) and _same_kind(first, node)):
            raise UnsupportedGraph(
                f"forward output {last.name} depends on a gradient, and it is not clear what was written "
                f"({ops.name(node)}; {ops.user_source(node)})"
            )
        node = first
    if ops.view_base(node) is not node or node.op == "placeholder":
        raise UnsupportedGraph(
            f"forward output {last.name} is a view of what the backward writes ({ops.user_source(last)})"
        )
    return node


def _same_kind(first: fx.Node, second: fx.Node) -> bool:
    a, b = first.meta.get("val"), second.meta.get("val")
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
