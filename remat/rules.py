"""Which values may not be recomputed and which may not be saved, each with the reason that users read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from remat import ops, torch_internals
from remat.joint import JointGraph
from remat.ops import Kind
from remat.plan import Plan
from remat.settings import Settings
from remat.torch_internals import CheckpointPolicy


@dataclass(frozen=True, eq=False)
class Rules:
    """Prohibitions, by node. A node in neither may be saved or recomputed, as the prices say."""

    no_recompute: dict[fx.Node, str]
    no_save: dict[fx.Node, str]


def make_rules(joint: JointGraph, settings: Settings) -> Rules:
    """Collect the prohibitions for every node that can run in the forward."""
    no_recompute: dict[fx.Node, str] = {}
    no_save: dict[fx.Node, str] = {}
    for node in joint.nodes:
        if node in joint.tangent_closure:
            continue
        reason = _why_not_recompute(node, settings)
        if reason:
            no_recompute[node] = reason
        reason = _why_not_save(node, joint)
        if reason:
            no_save[node] = reason
    return Rules(no_recompute, no_save)


def _why_not_recompute(node: fx.Node, settings: Settings) -> str | None:
    if node.op == "placeholder":
        return "an input"
    impure = ops.impurity(node, settings.recompute_ops)
    if impure:
        return impure
    if ops.is_view(node) or ops.is_item(node):
        return None
    if settings.save_ops and ops.is_named(node, settings.save_ops):
        return "named in save_ops"
    if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
        return "the user's checkpoint policy: must save"
    return None


def _why_not_save(node: fx.Node, joint: JointGraph) -> str | None:
    value = node.meta.get("val")
    if torch_internals.is_script_object(value):
        return None
    if torch_internals.is_sym_node(node):
        return None if isinstance(value, torch.SymInt) else "a symbolic number that is no integer"
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    kind = ops.kind(node)
    if kind is Kind.VIEW:
        return "a view: its base is saved instead"
    if kind in (Kind.FACTORY, Kind.CONSTANT):
        return "a constant"
    if node.target is torch_internals.LOOKUP_SEED:
        return "one seed of many: the tensor of seeds is saved instead"
    if node in joint.written_primals:
        return "an input that the forward writes"
    if node.op != "placeholder" and node.meta.get("recompute") in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    ):
        # Without a budget a preference is an order, as in PyTorch's partitioner; what may not run twice is
        # saved all the same.
        return None if ops.impurity(_operator(node)) else "the user's checkpoint policy: recompute"
    return None


def _operator(node: fx.Node) -> fx.Node:
    while ops.is_item(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def why_invalid(plan: Plan, rules: Rules) -> str | None:
    """The first rule that a plan breaks, told with node and user's line; None for a valid plan."""
    forward = plan.forward_set
    available = set(plan.saved) | set(plan.joint.tangent_closure)
    for node in plan.saved:
        if node in rules.no_save:
            return f"it saves {_told(node)}, which may not be saved: {rules.no_save[node]}"
    for node in plan.backward:
        for argument in node.all_input_nodes:
            if argument.op == "placeholder" and argument not in available:
                return f"the backward's {_told(node)} reads the input {argument.name}, which is not saved"
        if node in forward and node in rules.no_recompute:
            return f"it recomputes {_told(node)}, which may not be: {rules.no_recompute[node]}"
    return None


def _told(node: fx.Node) -> str:
    source = ops.user_source(node)
    return f"{node.name} ({ops.name(node)}{'; ' + source if source else ''})"
