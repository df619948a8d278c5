"""Write a plan's schedule into the two graphs."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from torch import fx

from remat import torch_internals
from remat.errors import InvalidPlan
from remat.passes.partition import Partition
from remat.plan import Plan


def order_forward(partition: Partition, plan: Plan) -> Partition:
    """Rebuild the forward in the plan's order."""
    return replace(partition, forward=_rebuilt(partition.forward, plan.forward, plan.joint.required_forward))


def order_backward(partition: Partition, plan: Plan) -> Partition:
    """Rebuild the backward in the plan's order."""
    return replace(partition, backward=_rebuilt(partition.backward, plan.backward, plan.joint.tangent_closure))


def _rebuilt(module: fx.GraphModule, order: Sequence[fx.Node], required: Set[fx.Node]) -> fx.GraphModule:
    """The same graph in another order. Nodes keep their names, so that the verifier can compare.

    The extraction keeps every random-tagged operator that it could run, used or not: what the plan does not run is
    dropped, but never a node that this half must run.
    """
    old = module.graph
    by_name = {node.name: node for node in old.nodes}
    graph = fx.Graph()
    built: dict[fx.Node, fx.Node] = {}
    for node in old.find_nodes(op="placeholder"):
        built[node] = graph.node_copy(node, built.__getitem__)
    for planned in order:
        found = by_name.get(planned.name)
        if found is None or found in built:
            continue  # it is dead in this graph, or passed in as a saved value
        unready = [argument.name for argument in found.all_input_nodes if argument not in built]
        if unready:
            raise InvalidPlan(f"the schedule runs {found.name} before {', '.join(unready)}")
        built[found] = graph.node_copy(found, built.__getitem__)
    for found in _needed_by_the_output(old):  # sizes that the extraction adds to what is saved, to bind symbols
        if found not in built:
            built[found] = graph.node_copy(found, built.__getitem__)
    unready = [argument.name for argument in old.output_node().all_input_nodes if argument not in built]
    must = {node.name for node in required}
    missing = [n.name for n in old.nodes if n not in built and n.op != "output" and n.name in must]
    if missing or unready:
        raise InvalidPlan(f"the schedule leaves out {', '.join([*missing, *unready][:5])}")
    output = graph.node_copy(old.output_node(), built.__getitem__)
    output.meta = dict(old.output_node().meta)
    return torch_internals.make_module(module, graph)


def _needed_by_the_output(graph: fx.Graph) -> list[fx.Node]:
    """The symbolic sizes that the output is computed from, in the graph's order."""
    needed = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed and torch_internals.is_sym_node(node)]
