"""Write a plan's schedule into the two graphs."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from torch import fx

from remat import torch_internals
from remat.errors import InvalidPlan
from remat.passes.partition import Partition
from remat.plan import Plan, original_name


def order_forward(partition: Partition, plan: Plan) -> Partition:
    """Rebuild the forward in the plan's order."""
    runs = list(zip(plan.forward, plan.forward_names, strict=True))
    return replace(partition, forward=_rebuilt(partition.forward, runs, plan.joint.required_forward))


def order_backward(partition: Partition, plan: Plan) -> Partition:
    """Rebuild the backward in the plan's order."""
    runs = list(zip(plan.backward, plan.backward_names, strict=True))
    return replace(partition, backward=_rebuilt(partition.backward, runs, plan.joint.tangent_closure))


def _rebuilt(module: fx.GraphModule, runs: Sequence[tuple[fx.Node, str]], required: Set[fx.Node]) -> fx.GraphModule:
    """The same graph in another order. Nodes keep their names, so that the verifier can compare; readers take the
    newest run.

    The extraction keeps every random-tagged operator that it could run, used or not: what the plan does not run is
    dropped, but never a node that this half must run.
    """
    old = module.graph
    by_name = {node.name: node for node in old.nodes}
    graph = fx.Graph()
    newest: dict[str, fx.Node] = {}  # by the name of the node in the joint graph

    def argument(node: fx.Node) -> fx.Node:
        return newest[original_name(node.name)]

    for node in old.find_nodes(op="placeholder"):
        newest[node.name] = graph.node_copy(node, argument)
    for planned, name in runs:
        again = name != planned.name
        template = by_name.get(name, planned if again else None)
        if template is None or template.op == "placeholder":
            continue  # it is dead in this graph, or passed in as a saved value
        unready = [a.name for a in template.all_input_nodes if original_name(a.name) not in newest]
        if unready:
            raise InvalidPlan(f"the schedule runs {template.name} before {', '.join(unready)}")
        # Not node_copy: it would take a name from a later node first, and give it another afterwards.
        arguments, keywords = fx.map_arg((template.args, template.kwargs), argument)
        copy = graph.create_node(template.op, template.target, arguments, keywords, name, template.type)
        copy.meta = dict(template.meta)
        newest[planned.name] = copy
    for found in _needed_by_the_output(old):  # sizes that the extraction adds to what is saved, to bind symbols
        if found.name not in newest:
            newest[found.name] = graph.node_copy(found, argument)
    unready = [a.name for a in old.output_node().all_input_nodes if original_name(a.name) not in newest]
    must = {node.name for node in required}
    missing = [n.name for n in old.nodes if n.name in must and n.op != "output" and n.name not in newest]
    if missing or unready:
        raise InvalidPlan(f"the schedule leaves out {', '.join([*missing, *unready][:5])}")
    output = graph.node_copy(old.output_node(), argument)
    output.meta = dict(old.output_node().meta)
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and node.name not in must:
            graph.erase_node(node)
    return torch_internals.make_module(module, graph)


def _needed_by_the_output(graph: fx.Graph) -> list[fx.Node]:
    """The symbolic sizes that the output is computed from, in the graph's order."""
    needed = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed and torch_internals.is_sym_node(node)]
