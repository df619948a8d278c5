"""Write a plan's schedule into the backward graph."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from remat import torch_internals
from remat.errors import InvalidPlan
from remat.passes.partition import Partition
from remat.plan import Plan


def order_backward(partition: Partition, plan: Plan) -> Partition:
    """Rebuild the backward in the plan's order. Nodes keep their names, so that the verifier can compare."""
    old = partition.backward.graph
    by_name = {node.name: node for node in old.nodes}
    graph = fx.Graph()
    built: dict[fx.Node, fx.Node] = {}
    for node in old.find_nodes(op="placeholder"):
        built[node] = graph.node_copy(node, built.__getitem__)
    for planned in plan.backward:
        node = by_name.get(planned.name)
        if node is None or node in built:
            continue  # dead in this graph, or passed in as a saved value
        built[node] = graph.node_copy(node, built.__getitem__)
    # The extraction keeps every random-tagged operator that it could run, used or not; what the plan does not run is
    # dropped, but never a node that must run in the backward.
    closure = {node.name for node in plan.joint.tangent_closure}
    missing = [n.name for n in old.nodes if n not in built and n.op != "output" and n.name in closure]
    if missing:
        raise InvalidPlan(f"the schedule leaves out {', '.join(missing[:5])} of the backward graph")
    output = graph.node_copy(old.output_node(), built.__getitem__)
    output.meta = dict(old.output_node().meta)
    return replace(partition, backward=torch_internals.make_module(partition.backward, graph))


def raise_items(partition: Partition, plan: Plan) -> Partition:
    """Put the items of a tuple right after the operator that makes it, so that unused results die there."""
    return replace(
        partition,
        forward=torch_internals.raise_getitems(partition.forward),
        backward=torch_internals.raise_getitems(partition.backward),
    )
