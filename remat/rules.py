"""Which values may not be recomputed and which may not be saved, each with the reason that users read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import fx

from remat import ops, torch_internals
from remat.costs import saved_bytes
from remat.discrete import jumps
from remat.joint import JointGraph
from remat.ops import Kind
from remat.plan import Plan
from remat.settings import Settings
from remat.torch_internals import CheckpointPolicy

_ORDERED: Final = "the user's checkpoint policy: recompute"


@dataclass(frozen=True, eq=False)
class Rules:
    """Prohibitions, by node. A node in none may be saved or recomputed, as the prices say.

    The `unwise` ones bind our own solvers; the plan of another partitioner may do so and is still valid.
    """

    no_recompute: dict[fx.Node, str]
    no_save: dict[fx.Node, str]
    unwise_recompute: dict[fx.Node, str] = field(default_factory=dict)
    unwise_save: dict[fx.Node, str] = field(default_factory=dict)


def make_rules(joint: JointGraph, settings: Settings) -> Rules:
    """Collect the prohibitions for every node that can run in the forward."""
    no_recompute: dict[fx.Node, str] = {}
    no_save: dict[fx.Node, str] = {}
    unwise_recompute: dict[fx.Node, str] = {}
    unwise_save: dict[fx.Node, str] = {}
    for node in joint.nodes:
        if node in joint.tangent_closure:
            continue
        reason = _why_not_recompute(node, joint, settings)
        if reason:
            no_recompute[node] = reason
        elif _may_jump(node, settings):
            unwise_recompute[node] = "last bits decide it, and it decides where elements go"
        reason = _why_not_save(node, joint)
        free = _operator(node) not in no_recompute and node not in unwise_recompute
        if not reason and free and (ordered_to_recompute(node, settings) or _made_of_ordered(node, joint, no_save)):
            reason = _ORDERED  # what may not run twice is saved all the same
        if reason:
            no_save[node] = reason
        elif node not in no_recompute and node not in unwise_recompute and _gains_nothing(node, joint):
            unwise_save[node] = "only the backward uses it, and it is no smaller than what it is made from"
    return Rules(no_recompute, no_save, unwise_recompute, unwise_save)


def _made_of_ordered(node: fx.Node, joint: JointGraph, no_save: dict[fx.Node, str]) -> bool:
    """Whether this value, which the backward alone uses, is made of what a checkpoint policy recomputes.

    A mask or a reduction carries no tag of its own; saving it would keep what the user ordered to be given up.
    """
    if node in joint.required_forward or node.op != "call_function" or node.meta.get("recompute") is not None:
        return False
    return any(no_save.get(ops.view_base(argument)) == _ORDERED for argument in node.all_input_nodes)


def ordered_to_recompute(node: fx.Node, settings: Settings) -> bool:
    """Whether a checkpoint policy in the model orders this value to be recomputed.

    A preference, with which plain torch.utils.checkpoint tags every node, is an order too, as in PyTorch's partitioner,
    but under a budget, or with `user_checkpoints="hint"`, it only makes saving dearer.
    """
    policy = node.meta.get("recompute")
    if node.op == "placeholder" or policy is None:
        return False
    obeyed = settings.user_checkpoints == "obey" and settings.budget is None
    return policy == CheckpointPolicy.MUST_RECOMPUTE or (policy == CheckpointPolicy.PREFER_RECOMPUTE and obeyed)


def _why_not_recompute(node: fx.Node, joint: JointGraph, settings: Settings) -> str | None:
    if node.op == "placeholder":
        return "an input"
    policy = node.meta.get("recompute")
    must = policy == CheckpointPolicy.MUST_RECOMPUTE
    # Who orders an operator to be recomputed vouches for its purity; what draws or writes stays forbidden.
    declared = (*settings.recompute_ops, ops.name(node)) if must else settings.recompute_ops
    impure = ops.impurity(node, declared)
    if impure:
        return impure
    written = [a.name for a in map(ops.view_base, node.all_input_nodes) if a in joint.written_primals]
    if written and ops.kind(node) not in (Kind.VIEW, Kind.FACTORY):  # those read no data
        return f"reads {written[0]}, an input that the forward writes"
    if node in joint.written_in_backward:
        return "the backward writes into its memory"
    if ops.is_view(node):
        return None
    if policy == CheckpointPolicy.MUST_SAVE:
        return "the user's checkpoint policy: must save"
    if settings.save_ops and ops.is_named(node, settings.save_ops) and ops.kind(node) is not Kind.FACTORY:
        return "named in save_ops"
    return None


def _may_jump(node: fx.Node, settings: Settings) -> bool:
    """Whether a recomputed value could be another one altogether; the user's orders and `recompute_ops` stand above."""
    if ordered_to_recompute(node, settings) and node.meta["recompute"] == CheckpointPolicy.MUST_RECOMPUTE:
        return False
    return not ops.is_named(_operator(node), settings.recompute_ops) and jumps(node)


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
    if node in joint.written_primals and not joint.only_written_by_backward(node):
        return "an input that the forward writes"
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
    seen: set[fx.Node] = set()
    for node in (*plan.forward, *plan.backward):
        if node in seen and node in rules.no_recompute:
            return f"it recomputes {_told(node)}, which may not be: {rules.no_recompute[node]}"
        seen.add(node)
    return None


def _told(node: fx.Node) -> str:
    source = ops.user_source(node)
    return f"{node.name} ({ops.name(node)}{'; ' + source if source else ''})"
