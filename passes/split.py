"""Cut the joint graph in two along a plan."""

from __future__ import annotations

from typing import Any

from torch import fx

from remat import torch_internals
from remat.passes.partition import Partition
from remat.plan import Plan


def split(plan: Plan) -> Partition:
    """Extract forward and backward; torch's extraction keeps its calling conventions, the plan says what is saved."""
    joint = plan.joint
    module, saved = _with_further_runs(plan)
    forward, backward, num_sizes = torch_internals.extract(
        module, saved, joint.num_fwd_outputs, joint.static_indices
    )
    forward = torch_internals.thread_rng_states(forward, is_backward=False)
    backward = torch_internals.thread_rng_states(backward, is_backward=True)
    return Partition(forward, backward, num_sizes)


def _with_further_runs(plan: Plan) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The joint graph with a node for each further run of the backward, and the saved values in it.

    The extraction leaves out saved values that the backward does not read: it must see what reads them.
    """
    joint = plan.joint
    if all(name == node.name for node, name in zip(plan.backward, plan.backward_names, strict=True)):
        return joint.module, list(plan.saved)
    graph = fx.Graph()
    newest: dict[fx.Node, fx.Node] = {}

    def create(node: fx.Node, name: str) -> None:
        arguments, keywords = fx.map_arg((node.args, node.kwargs), newest.__getitem__)
        newest[node] = graph.create_node(node.op, node.target, arguments, keywords, name, node.type)
        newest[node].meta = dict(node.meta)

    for node in joint.nodes:
        if node not in joint.tangent_closure or node.op == "placeholder":
            create(node, node.name)
    saved = [newest[node] for node in plan.saved]
    forward = dict(newest)
    for node, name in zip(plan.backward, plan.backward_names, strict=True):
        if name != node.name or node not in newest:
            create(node, name)
    outputs: list[Any] = []
    for position, value in enumerate(joint.outputs):
        # What the forward returns is its own run; but a write of the backward may stand among its outputs too.
        made = forward if position < joint.num_fwd_outputs and value in forward else newest
        outputs.append(made[value] if isinstance(value, fx.Node) else value)
    result = graph.output(outputs)
    result.meta = dict(joint.output.meta)
    return torch_internals.make_module(joint.module, graph), saved
