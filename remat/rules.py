"""Which values may not be recomputed and which may not be saved, each with the reason that users read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from remat import ops, torch_internals
from remat.costs import saved_bytes
from remat.joint import JointGraph
from remat.ops import Kind
from remat.plan import Plan
from remat.settings import Settings
from remat.torch_internals import CheckpointPolicy


@dataclass(frozen=True, eq=False)
class Rules:
    """Prohibitions, by node. A node in none may be saved or recomputed, as the prices say.

    `unwise` holds values that could be saved, but never should: a solver leaves them out, a plan of another
    partitioner may have them.
    """

    no_recompute: dict[fx.Node, str]
    no_save: dict[fx.Node, str]
    unwise: dict[fx.Node, str] = field(default_factory=dict)


def make_rules(joint: JointGraph, settings: Settings) -> Rules:
    """Collect the prohibitions for every node that can run in the forward."""
    no_recompute: dict[fx.Node, str] = {}
    no_save: dict[fx.Node, str] = {}
    unwise: dict[fx.Node, str] = {}
    for node in joint.nodes:
        if node in joint.tangent_closure:
            continue
        reason = _why_not_recompute(node, settings)
        if node in joint.written_in_backward:
            reason = reason or "the backward writes into its memory"
        if reason:
            no_recompute[node] = reason
        reason = _why_not_save(node, joint, no_recompute)
        if reason:
            no_save[node] = reason
        elif node not in no_recompute and _gains_nothing(node, joint):
            unwise[node] = "only the backward uses it, and it is no smaller than what it is made from"
    return Rules(no_recompute, no_save, unwise)


def _why_not_recompute(node: fx.Node, settings: Settings) -> str | None:
    if node.op == "placeholder":
        return "an input"
    ordered = node.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE
    # Who orders an operator to be recomputed vouches for its purity; what draws or writes stays forbidden.
    declared = (*settings.recompute_ops, ops.name(node)) if ordered else settings.recompute_ops
    impure = ops.impurity(node, declared)
    if impure:
        return impure
    if ops.is_view(node) or ops.is_item(node):
        return None
    if settings.save_ops and ops.is_named(node, settings.save_ops):
        return "named in save_ops"
    if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
        return "the user's checkpoint policy: must save"
    return None


def _why_not_save(node: fx.Node, joint: JointGraph, no_recompute: dict[fx.Node, str]) -> str | None:
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
        return None if _operator(node) in no_recompute else "the user's checkpoint policy: recompute"
    return None


def _gains_nothing(node: fx.Node, joint: JointGraph) -> bool:
    """Whether making this value in the forward only moves work and memory there (pytorch#146693).

    A value that depends on no gradient but is used by the backward alone may be made in either. Worth saving is
    the narrow one, such as a mask, or the one that stands for several; a cast, a copy or a derivative is not.
    """
    if node in joint.required_forward or ops.kind(node) is not Kind.POINTWISE:
        return False
    bases = {ops.view_base(argument) for argument in node.all_input_nodes}
    if any(base in joint.written_primals for base in bases):
        return False
    return saved_bytes(node) >= sum(map(saved_bytes, bases))


def _operator(node: fx.Node) -> fx.Node:
    while ops.is_item(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def why_invalid(plan: Plan, rules: Rules) -> str | None:
    """The first rule that a plan breaks, told with node and user's line; None for a valid plan."""
    available = set(plan.saved) | set(plan.joint.tangent_closure)
    for node in plan.saved:
        if node in rules.no_save:
            return f"it saves {_told(node)}, which may not be saved: {rules.no_save[node]}"
    for node in plan.backward:
        for argument in node.all_input_nodes:
            if argument.op == "placeholder" and argument not in available:
                return f"the backward's {_told(node)} reads the input {argument.name}, which is not saved"
        if node in plan.forward_set and node in rules.no_recompute:
            return f"it recomputes {_told(node)}, which may not be: {rules.no_recompute[node]}"
    return None


def _told(node: fx.Node) -> str:
    source = ops.user_source(node)
    return f"{node.name} ({ops.name(node)}{'; ' + source if source else ''})"
