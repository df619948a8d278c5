"""Turn what the user and torch's runtime demand of single nodes into `recompute` tags."""

from __future__ import annotations

from dataclasses import replace

from remat import torch_internals
from remat.joint import JointGraph
from remat.settings import Settings


def forced_saves(joint: JointGraph, settings: Settings) -> JointGraph:
    """Save what torch says must be: checkpoint regions' boundaries, collectives, effects, sources of writes."""
    torch_internals.apply_forced_saves(joint.module)
    return replace(joint)
