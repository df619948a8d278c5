"""Prove of every partition that it computes the joint graph, and recomputes only what may be.

Runs after every split and before anything is compiled. What it proves, by comparing node for node with the joint
graph (names survive the split):
1. The forward takes the primals and returns the joint graph's forward outputs, in order, with their descriptions,
   then the saved values; the backward takes exactly those saved values and the tangents, and returns the gradients.
2. Every node of the two graphs is a node of the joint graph, or a further run of one: same operator, same arguments.
3. What the backward writes is read afterwards only where the joint graph does so.
4. What is random, writing, collective, effectful or of unknown purity runs once in the two graphs together, and no
   backward node reads an input that the forward writes.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from remat import ops, torch_internals
from remat.errors import InvalidPlan
from remat.joint import JointGraph, written_arguments
from remat.passes.partition import Partition
from remat.plan import Plan, original_name
from remat.rules import Rules, why_invalid


def verify(partition: Partition, plan: Plan, rules: Rules) -> None:
    """Raise InvalidPlan, naming the node and the user's line, where a partition breaks a rule."""
    broken = why_invalid(plan, rules)
    if broken:
        raise InvalidPlan(f"the plan by {plan.solver!r} is invalid: {broken}")
    joint = plan.joint
    _same_nodes(partition.forward, joint, "forward")
    _same_nodes(partition.backward, joint, "backward")
    _forward_interface(partition, joint)
    _backward_interface(partition, joint)
    _runs_once(partition, joint, rules)
    _reads_before_writes(partition, joint)


def _names(values: Any) -> list[Any]:
    return [value.name if isinstance(value, fx.Node) else value for value in values]


def _results(module: fx.GraphModule) -> list[Any]:
    (results,) = module.graph.output_node().args
    return list(results) if isinstance(results, tuple | list) else [results]


def _same_nodes(module: fx.GraphModule, joint: JointGraph, which: str) -> None:
    for node in module.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        original = joint.by_name.get(original_name(node.name))
        if original is None or original.target != node.target or original.op != node.op:
            raise InvalidPlan(f"{which} node {node.name} ({ops.name(node)}) is not in the joint graph")
        mine = fx.map_arg((node.args, node.kwargs), lambda n: original_name(n.name))
        theirs = fx.map_arg((original.args, original.kwargs), lambda n: n.name)
        if _without_rng_states(mine) != _without_rng_states(theirs):
            raise InvalidPlan(f"{which} node {node.name} has arguments {mine}, in the joint graph {theirs}")


def _without_rng_states(arguments: Any) -> str:
    """Arguments as text: the states that the split threads into nested subgraphs are not in the joint graph."""
    return ", ".join(part for part in repr(arguments).split(", ") if "_rng_state_" not in part)


def _inputs_in_order(module: fx.GraphModule, expected: list[str], which: str) -> None:
    """The inputs that come from outside, in the joint graph's order; extracted graphs may leave none of them out."""
    given = [node.name for node in module.graph.find_nodes(op="placeholder") if node.name in set(expected)]
    if given != expected:
        raise InvalidPlan(f"the {which} takes {given}, in the joint graph they come as {expected}")


def _forward_interface(partition: Partition, joint: JointGraph) -> None:
    seeds = [node.name for node in joint.nodes if torch_internals.is_forward_seed(node)]
    inputs = [node.name for node in joint.primals if not torch_internals.is_script_object(node.meta.get("val"))]
    _inputs_in_order(partition.forward, inputs + seeds, "forward")
    expected = _names(joint.outputs[: joint.num_fwd_outputs])
    results = _results(partition.forward)
    if len(results) < len(expected):
        raise InvalidPlan(f"the forward returns {len(results)} values, the joint graph's has {len(expected)}")
    for position, (mine, theirs) in enumerate(zip(_names(results), expected, strict=False)):
        if mine != theirs and not (isinstance(theirs, str) and _stands_for(theirs, mine, joint)):
            raise InvalidPlan(f"forward output {position} is {mine}, in the joint graph {theirs}")
    mine = list(partition.forward.graph.output_node().meta.get("desc") or ())[: joint.num_fwd_outputs]
    theirs = list(joint.output.meta.get("desc") or ())[: joint.num_fwd_outputs]
    if theirs and mine != theirs:
        raise InvalidPlan("the forward outputs' descriptions are not those of the joint graph")


def _stands_for(written: str, mine: Any, joint: JointGraph) -> bool:
    """A write that belongs to the backward is returned by the forward as the input it will write."""
    node = joint.by_name.get(written)
    return (
        node is not None
        and ops.is_mutating(node)
        and isinstance(node.args[0], fx.Node)
        and node.args[0].name == mine
    )


def _backward_interface(partition: Partition, joint: JointGraph) -> None:
    seeds = [node.name for node in joint.nodes if torch_internals.is_backward_seed(node)]
    _inputs_in_order(partition.backward, [node.name for node in joint.tangents] + seeds, "backward")
    saved = _names(_results(partition.forward)[joint.num_fwd_outputs :])
    sizes = saved[len(saved) - partition.num_sizes :]
    taken = []
    for node in partition.backward.graph.find_nodes(op="placeholder"):
        original = joint.by_name.get(node.name)
        outside = original is not None and original.op == "placeholder" and original in joint.tangent_closure
        if not (outside or torch_internals.is_script_object(node.meta.get("val")) or "_rng_state_" in node.name):
            taken.append(node.name)
    expected = sizes + saved[: len(saved) - partition.num_sizes]
    expected = [name for name in expected if name in set(taken) or not _is_object(name, joint)]
    if taken != expected:
        raise InvalidPlan(f"the forward saves {expected}, the backward takes {taken}")
    mine = [original_name(n) if isinstance(n, str) else n for n in _names(_results(partition.backward))]
    theirs = _names(joint.outputs[joint.num_fwd_outputs :])
    if mine != theirs:
        raise InvalidPlan(f"the backward returns {mine}, the joint graph {theirs}")


def _is_object(name: Any, joint: JointGraph) -> bool:
    node = joint.by_name.get(name) if isinstance(name, str) else None
    return node is not None and torch_internals.is_script_object(node.meta.get("val"))


def _reads_before_writes(partition: Partition, joint: JointGraph) -> None:
    """What the joint graph reads before the backward writes it is not read afterwards."""
    written: dict[fx.Node, fx.Node] = {}  # by the node that owns the memory: the writer, as in the joint graph
    for node in partition.backward.graph.nodes:
        if node.op != "call_function":
            continue
        original = joint.by_name[original_name(node.name)]
        for argument in node.all_input_nodes if not ops.is_view(node) else ():
            writer = written.get(ops.view_base(argument))
            if writer is not None and joint.index[original] < joint.index[writer]:
                raise InvalidPlan(f"{node.name} reads what {writer.name} has written, in the joint graph before it")
        if ops.is_mutating(node):
            for argument in written_arguments(node):
                written.setdefault(ops.view_base(argument), original)


def _runs_once(partition: Partition, joint: JointGraph, rules: Rules) -> None:
    written = {node.name for node in joint.written_primals}
    seen: set[str] = set()
    for node in (*partition.forward.graph.nodes, *partition.backward.graph.nodes):
        in_backward = node.graph is partition.backward.graph
        reads = [user for user in node.users if not (ops.is_mutating(user) and user.args[0] is node)]
        if in_backward and node.op == "placeholder" and node.name in written and reads:
            raise InvalidPlan(f"the backward reads input {node.name}, which the forward writes")
        if node.op != "call_function":
            continue
        original = joint.by_name[original_name(node.name)]
        reason = rules.no_recompute.get(original)
        if original in joint.tangent_closure and not reason:
            reason = "it belongs to the backward"
        if original.name in seen and reason:
            raise InvalidPlan(f"{original.name} ({ops.name(node)}; {ops.user_source(node)}) runs twice: {reason}")
        seen.add(original.name)
