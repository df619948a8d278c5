"""Keep the old value of an input that the forward writes and the backward reads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from remat import ops
from remat.joint import JointGraph
from remat.settings import Settings


def snapshot_written_inputs(joint: JointGraph, settings: Settings) -> JointGraph:
    """Clone each written input whose memory the backward reads, and let everything read the clone.

    Under a functional graph the write comes last, as a `copy_`, or after the forward; a backward that reads the
    input then sees the new value, and the gradient is silently wrong (pytorch PR 197039). The clone can be saved.
    """
    reads = {base for node in joint.needed_by_backward if (base := ops.view_base(node)) in joint.written_primals}
    graph = joint.module.graph
    for primal in [node for node in joint.primals if node in reads]:
        with graph.inserting_before(_first_call(graph)):
            clone = graph.call_function(torch.ops.aten.clone.default, (primal,))
        clone.meta = {key: value for key, value in primal.meta.items() if key in ("val", "tensor_meta")}
        clone.meta["stack_trace"] = next((u.meta.get("stack_trace") for u in primal.users if u is not clone), None)
        for user in [user for user in primal.users if user is not clone and not _writes(user)]:
            user.replace_input_with(primal, clone)
    return replace(joint)


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _writes(user: fx.Node) -> bool:
    """The write-back itself, and the output, where the input stands for its new value, keep the input."""
    return user.op == "output" or ops.is_mutating(user)
