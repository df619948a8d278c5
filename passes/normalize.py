"""Bring the joint graph into the form that planning expects: a copy of its own, nothing dead, nothing twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from remat import ops, torch_internals
from remat.joint import JointGraph
from remat.settings import Settings


def copy_graph(joint: JointGraph, settings: Settings) -> JointGraph:
    """Copy the graph, not its tensors, so that the fallback finds the original untouched."""
    return replace(joint, module=copy_module(joint.module))


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """A module over a copy of its graph, tensors shared.

    Deep-copying the module fails where constants were lifted (T5, Whisper); its graph can always be copied.
    """
    graph = fx.Graph()
    results = graph.graph_copy(module.graph, {})
    output = graph.output(results)
    output.meta = dict(module.graph.output_node().meta)
    return torch_internals.make_module(module, graph)


def dead_code(joint: JointGraph, settings: Settings) -> JointGraph:
    """Drop what nothing uses."""
    joint.module.graph.eliminate_dead_code()
    return replace(joint)


def common_subexpressions(joint: JointGraph, settings: Settings) -> JointGraph:
    """Merge equal computations: same operator, same arguments, pure, and under the same checkpoint policy.

    torch's own pass knows a fixed list of random operators and merges others, custom draws among them. A write ends
    what may be merged: what was read before it is not what is read after (pytorch#132200). What is returned stays a
    tensor of its own, since the caller may write into it.
    """
    first: dict[Any, fx.Node] = {}
    returned = _makers_of_outputs(joint)
    for node in list(joint.module.graph.nodes):
        if node.op == "call_function" and ops.is_mutating(node):
            first.clear()
        if node.op != "call_function" or node in returned or not _may_merge(node, settings):
            continue
        key = _key(node)
        twin = first.setdefault(key, node) if key is not None else node
        if twin is not node:
            node.replace_all_uses_with(twin)
            joint.module.graph.erase_node(node)
    return replace(joint)


def _makers_of_outputs(joint: JointGraph) -> set[fx.Node]:
    """The operators whose memory is returned, and the items of theirs that are."""
    makers: set[fx.Node] = set()
    for node in (*joint.forward_outputs, *joint.backward_outputs):
        base = ops.view_base(node)
        makers.update((node, base, *(base.all_input_nodes if ops.is_item(base) else ())))
    return makers


def _may_merge(node: fx.Node, settings: Settings) -> bool:
    if ops.is_item(node):
        return True
    # A new tensor may be somebody's buffer to write into (pytorch#170160).
    written = any(ops.is_mutating(user) or torch_internals.is_higher_order(user.target) for user in node.users)
    return ops.impurity(node, settings.recompute_ops) is None and not (ops.kind(node) is ops.Kind.FACTORY and written)


def _key(node: fx.Node) -> Any:
    """What makes two nodes the same computation; None where an argument cannot be compared."""
    # 1, 1.0 and True are equal keys and different arguments, and so are 0.0 and -0.0.
    leaves, shape = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
    key = (
        node.target,
        str(shape),
        tuple((type(leaf), repr(leaf) if isinstance(leaf, float) else leaf) for leaf in leaves),
        *(node.meta.get(tag) for tag in ("recompute", "ac_graph_id")),
        torch_internals.must_be_in_forward(node),
        torch_internals.must_be_in_backward(node),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key
