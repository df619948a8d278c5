"""Bring the joint graph into the form that planning expects: a copy of its own, nothing dead, nothing twice."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from remat import torch_internals
from remat.joint import JointGraph
from remat.settings import Settings


def copy_graph(joint: JointGraph, settings: Settings) -> JointGraph:
    """Copy the graph, not its tensors, so that the fallback finds the original untouched.

    Deep-copying the module fails where constants were lifted (T5, Whisper); its graph can always be copied.
    """
    old = joint.module.graph
    graph = fx.Graph()
    results = graph.graph_copy(old, {})
    output = graph.output(results)
    output.meta = dict(old.output_node().meta)
    return replace(joint, module=torch_internals.make_module(joint.module, graph))


def dead_code(joint: JointGraph, settings: Settings) -> JointGraph:
    """Drop what nothing uses. A draw whose result is unused goes too, as under Inductor."""
    joint.module.graph.eliminate_dead_code()
    return replace(joint)


def common_subexpressions(joint: JointGraph, settings: Settings) -> JointGraph:
    """Merge equal computations by torch's own pass, which leaves random draws and writes alone."""
    graph = torch_internals.fx_graph_cse(joint.module.graph)
    return replace(joint, module=torch_internals.make_module(joint.module, graph))
