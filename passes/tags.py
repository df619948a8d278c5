"""Turn what the user and torch's runtime demand of single nodes into `recompute` tags."""

from __future__ import annotations

from dataclasses import replace

from remat import ops, torch_internals
from remat.joint import JointGraph
from remat.settings import Settings
from remat.torch_internals import CheckpointPolicy


def forced_saves(joint: JointGraph, settings: Settings) -> JointGraph:
    """Save what torch says must be: checkpoint regions' boundaries, collectives, effects, sources of writes."""
    torch_internals.apply_forced_saves(joint.module)
    for node in joint.module.graph.nodes:
        base = ops.view_base(node)
        if base is not node and node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE and base.op == "call_function":
            base.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # views are never saved, their bases are
    return replace(joint)


def backward_draws(joint: JointGraph, settings: Settings) -> JointGraph:
    """Leave what the backward draws from a generator in the backward, though it may depend on no gradient.

    A joint graph is traced forward first. AOTAutograd's own tags are missing in a custom function's backward.
    """
    calls = [node for node in joint.nodes if node.op == "call_function"]
    first = next((place for place, node in enumerate(calls) if node in joint.tangent_closure), len(calls))
    for node in calls[first:]:
        if ops.draws_random_numbers(node) and node not in joint.required_forward:
            torch_internals.order_into_backward(node)
    return replace(joint)
