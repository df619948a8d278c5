"""Cut the joint graph in two along a plan."""

from __future__ import annotations

from remat import torch_internals
from remat.passes.partition import Partition
from remat.plan import Plan


def split(plan: Plan) -> Partition:
    """Extract forward and backward; torch's extraction keeps its calling conventions, the plan says what is saved."""
    joint = plan.joint
    forward, backward, num_sizes = torch_internals.extract(
        joint.module, plan.saved, joint.num_fwd_outputs, joint.static_indices
    )
    forward = torch_internals.thread_rng_states(forward, is_backward=False)
    backward = torch_internals.thread_rng_states(backward, is_backward=True)
    return Partition(forward, backward, num_sizes)
