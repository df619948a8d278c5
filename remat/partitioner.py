"""The partitioner that Inductor calls: joint graph in, forward and backward graph out."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from remat import network as flow
from remat import passes, session, torch_internals
from remat.costs import Costs
from remat.devices import figures
from remat.joint import JointGraph
from remat.passes.normalize import copy_graph
from remat.passes.partition import Partition
from remat.plans import Candidate, Planner
from remat.report import PlanSummary, summarize, summarize_halves
from remat.rules import make_rules
from remat.settings import Settings


@dataclass(frozen=True)
class Decision:
    """Everything that was decided about one joint graph."""

    joint: JointGraph
    chosen: Candidate
    planner: Planner
    partition: Partition
    summary: PlanSummary


def decide(joint: JointGraph, settings: Settings, graph: str = "") -> Decision:
    """The whole pipeline: normalize, price, cut, plan, split, reorder, verify.

    Raises UnsupportedGraph, UnsatisfiableCut or InvalidPlan; the graph given is left as it was.
    """
    started = time.thread_time()
    joint = passes.prepare(joint, settings)
    in_bytes = isinstance(settings.budget, int)
    with no_collection(), torch_internals.sizes_at_hand() if in_bytes else contextlib.nullcontext():
        return _decide(joint, settings, graph, started)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector: the search makes no cycles, and it would walk all of torch again and again.

    With it a decision for a chain of 1,024 layers (3,076 nodes) took 10.9 s, without 6.8 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _decide(joint: JointGraph, settings: Settings, graph: str, started: float) -> Decision:
    costs = Costs(joint, figures(joint.device), settings)
    rules = make_rules(joint, settings)
    planner = Planner(joint, costs, rules, settings)
    chosen, reference = planner.choose()
    partition = passes.rewrite(chosen.plan, rules)
    summary = summarize(graph, chosen, reference, planner, time.thread_time() - started)
    return Decision(joint, chosen, planner, partition, summary)


def torchs_halves(
    joint: JointGraph, joint_inputs: Any, keywords: dict[str, Any], settings: Settings
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's own forward and backward at the budget of the settings, a fraction of saved bytes (`min`: 0)."""
    fraction = 0.0 if settings.budget == "min" else float(settings.budget or 1.0)
    copy = copy_graph(joint, settings).module
    return torch_internals.partition_with_torch(copy, joint_inputs, keywords, fraction)


@dataclass(frozen=True)
class Partitioner(torch_internals.CustomPartitionerFn):
    """remat as Inductor's `custom_partitioner_fn`. Plain values only: Inductor copies and pickles it."""

    settings: Settings = field(default_factory=Settings)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
        """Partition; what remat cannot handle goes to PyTorch's partitioner with one warning, unless strict."""
        static = tuple(keywords.get("static_lifetime_input_indices") or ())
        joint = JointGraph(gm, keywords["num_fwd_outputs"], static)
        current = session.current()
        graph = current.graph if current else "unnamed"
        if current is not None and self.settings.check:
            current.joint = copy_graph(joint, self.settings).module
            current.num_fwd_outputs = joint.num_fwd_outputs
        if self.settings.partitioner == "torch" and self.settings.budget is not None:
            return self._by_torch(joint, joint_inputs, keywords, graph)
        try:
            decision = decide(joint, self.settings, graph)
        except Exception as error:  # whatever goes wrong in ours, the user's training goes on
            if self.settings.strict:
                raise
            reason = f"{type(error).__name__}: {error}"
            session.record(PlanSummary(graph, "fallback", reason=reason))
            copy = copy_graph(joint, self.settings).module
            return torch_internals.partition_with_torch(copy, joint_inputs, keywords)
        session.record(decision.summary)
        if self.settings.dump:
            dump(decision, Path(self.settings.dump))
        return decision.partition.forward, decision.partition.backward

    def _by_torch(
        self, joint: JointGraph, joint_inputs: Any, keywords: dict[str, Any], graph: str
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """PyTorch's partition at its own budget, as it is: what remat is measured against. Nothing verifies it."""
        started = time.thread_time()
        halves = torchs_halves(joint, joint_inputs, keywords, self.settings)
        seconds = time.thread_time() - started
        costs = Costs(joint, figures(joint.device), self.settings)
        session.record(summarize_halves(graph, joint, costs, halves, seconds))
        return halves

    def uuid(self) -> Any:
        """Key of the compile cache: every source file, every setting that matters, the device's figures."""
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        return ("remat", session.source_hash(), self.settings.cache_key(), repr(figures(device)))


def dump(decision: Decision, folder: Path) -> None:
    """Write the three graphs, the network's arcs and the plan's summary."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{decision.summary.graph}_{sum(1 for _ in folder.glob('*_plan.json'))}"
    graphs = {
        "joint": decision.joint.module,
        "forward": decision.partition.forward,
        "backward": decision.partition.backward,
    }
    for name, module in graphs.items():
        text = module.print_readable(print_output=False, include_stride=True, include_device=True)
        (folder / f"{stem}_{name}.py").write_text(text)
    (folder / f"{stem}_network.json").write_text(json.dumps(flow.as_data(decision.planner.network), indent=1))
    (folder / f"{stem}_plan.json").write_text(json.dumps(asdict(decision.summary), indent=1))
