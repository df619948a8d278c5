"""Graph rewriting. The two pipelines, top to bottom, are the tuples below; `prepare` and `rewrite` run them.

A pass is a plain function. It leaves its graph valid; only the runners here lint and time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from remat.joint import JointGraph
from remat.passes.backward_writes import writes_to_forward_outputs
from remat.passes.normalize import common_subexpressions, copy_graph, dead_code
from remat.passes.partition import Partition
from remat.passes.reorder import order_backward, order_forward
from remat.passes.snapshot import snapshot_written_inputs
from remat.passes.split import split
from remat.passes.tags import backward_draws, forced_saves
from remat.passes.verify import verify
from remat.plan import Plan
from remat.rules import Rules
from remat.settings import Settings

Preparation = Callable[[JointGraph, Settings], JointGraph]
Rewriting = Callable[[Partition, Plan], Partition]

PREPARE: Final[tuple[Preparation, ...]] = (
    copy_graph,
    dead_code,
    common_subexpressions,
    backward_draws,
    writes_to_forward_outputs,
    snapshot_written_inputs,
    forced_saves,
)
REWRITE: Final[tuple[Rewriting, ...]] = (order_forward, order_backward)


def prepare(joint: JointGraph, settings: Settings) -> JointGraph:
    """The joint graph, normalized and tagged; the one given stays untouched."""
    for step in PREPARE:
        joint = step(joint, settings)
        joint.module.graph.lint()
    joint.check()
    return joint


def rewrite(plan: Plan, rules: Rules) -> Partition:
    """Forward and backward graph of a plan, verified against the joint graph."""
    partition = split(plan)
    for step in REWRITE:
        partition = step(partition, plan)
        partition.forward.graph.lint()
        partition.backward.graph.lint()
    verify(partition, plan, rules)
    return partition
