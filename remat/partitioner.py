"""The partitioner that Inductor calls: joint graph in, forward and backward graph out."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from remat import exact, measured, passes, registry, session, torch_internals
from remat import network as flow
from remat.costs import Costs
from remat.errors import RematError
from remat.joint import JointGraph
from remat.passes.normalize import copy_graph
from remat.passes.partition import Partition
from remat.plans import Candidate, Planner
from remat.report import PlanSummary, summarize, summarize_halves
from remat.rules import make_rules
from remat.settings import Settings
from remat.several import Share
from remat.snapshot import Snapshot, load, machine_of, timings_name
from remat.store import open_store


@dataclass(frozen=True)
class Decision:
    """Everything that was decided about one joint graph."""

    joint: JointGraph
    chosen: Candidate
    planner: Planner
    partition: Partition
    summary: PlanSummary


class NoSuchPlan(RematError):
    """There are fewer promising plans than were asked for, or none can be made."""


def decide(
    joint: JointGraph,
    settings: Settings,
    graph: str = "",
    snapshot: Snapshot | None = None,
    choice: int = 0,
    share: Share | None = None,
) -> Decision:
    """The whole pipeline: normalize, price, cut, plan, split, reorder, verify.

    snapshot: what prices are made from; None: what the store has for the graph's device.
    choice: which of the promising plans to take; 0: the one that the prices tell.
    share: of a step of several graphs what this one needs to know.
    Raises UnsupportedGraph, UnsatisfiableCut, InvalidPlan or NoSuchPlan; the graph given is left as it was.
    """
    started = time.thread_time()
    snapshot = snapshot or load(joint.device, settings)
    joint = passes.prepare(joint, settings)
    in_bytes = isinstance(settings.budget, int)
    with no_collection(), torch_internals.sizes_at_hand() if in_bytes else contextlib.nullcontext():
        costs = Costs(joint, snapshot.device, settings, known_seconds(joint, snapshot, settings))
        planner = Planner(joint, costs, make_rules(joint, settings), settings, share)
        settled = _settled(planner, graph, choice)
        seconds = time.thread_time() - started
        summary = summarize(graph, settled.candidate, planner.torchs, planner, seconds, settled.memory)
        return Decision(joint, settled.candidate, planner, settled.partition, summary)


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


def _settled(planner: Planner, graph: str, choice: int) -> exact.Settled:
    """The plan that the settings ask for, or one of the promising ones, with its partition."""
    exactly = exact.Exactly(planner, graph if session.current() else None)
    first = exactly.settle() if exact.is_wanted(planner) else exactly.predicted()
    if not choice:
        return first
    others = planner.promising(planner.settings.tune, first.candidate)[1:]
    fitting = [found for other in others if (found := exactly.within(other, first)) is not None]
    if choice > len(fitting):
        raise NoSuchPlan(f"plan {choice + 1} of {len(fitting) + 1} promising ones")
    return fitting[choice - 1]


def known_seconds(joint: JointGraph, snapshot: Snapshot, settings: Settings) -> dict[fx.Node, float]:
    """What is known of one run of the operators outside of generated kernels: registered, timed or learned.

    Under `cost=profile` those that the store does not know are timed now, a few seconds long.
    """
    found: dict[fx.Node, float] = {}
    machine = machine_of(joint.device)
    if settings.cost == "profile" and machine is not None:
        found = measured.seconds_of(joint, open_store(settings.cache_dir), timings_name(joint.device, machine))
    elif settings.cost == "learned" and snapshot.learned is not None:
        described = ((node, measured.describe(node)) for node in joint.nodes)
        guessed = ((node, snapshot.learned.seconds(operator)) for node, operator in described if operator is not None)
        found = {node: seconds for node, seconds in guessed if seconds is not None}
    return found | registry.seconds_of(joint.nodes)


def torchs_halves(
    joint: JointGraph, joint_inputs: Any, keywords: dict[str, Any], settings: Settings
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's own forward and backward at the budget of the settings, a fraction of saved bytes (`min`: 0)."""
    fraction = 0.0 if settings.budget == "min" else float(settings.budget or 1.0)
    copy = copy_graph(joint, settings).module
    return torch_internals.partition_with_torch(copy, joint_inputs, keywords, fraction)


@dataclass(frozen=True)
class Partitioner(torch_internals.CustomPartitionerFn):
    """remat as Inductor's `custom_partitioner_fn`. Plain values only: Inductor copies and pickles it.

    figures: the hash of the snapshot that prices are made from; empty: of what the store has when asked.
    choice: which of the promising plans to take (tune.py).
    share: of a step of several graphs what this one needs to know.
    """

    settings: Settings = field(default_factory=Settings)
    figures: str = ""
    choice: int = 0
    share: Share | None = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
        """Partition; what remat cannot handle goes to PyTorch's partitioner with one warning, unless strict.

        In a trial it ends that trial by NoSuchPlan instead: the compilation that counts tells about it.
        """
        static = tuple(keywords.get("static_lifetime_input_indices") or ())
        joint = JointGraph(gm, keywords["num_fwd_outputs"], static)
        current = session.current()
        graph = current.graph if current else "unnamed"
        if current is not None and self.settings.check:
            current.joint = copy_graph(joint, self.settings).module
            current.num_fwd_outputs = joint.num_fwd_outputs
        if self.settings.partitioner == "torch" and self.settings.budget is not None:
            return self._by_torch(joint, joint_inputs, keywords, graph)
        settings = self.settings
        if current is not None:  # the folder of documents is not among the settings that are pickled
            settings = dataclasses.replace(settings, cache_dir=current.settings.cache_dir)
        try:
            snapshot = current.snapshot if current else None
            decision = decide(joint, settings, graph, snapshot, self.choice, self.share)
        except Exception as error:  # whatever goes wrong in ours, the user's training goes on
            if self.settings.strict:
                raise
            if current is not None and current.is_trial:
                raise NoSuchPlan(f"{type(error).__name__}: {error}") from error
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
        current = session.current()
        snapshot = current.snapshot if current else load(joint.device, self.settings)
        costs = Costs(joint, snapshot.device, self.settings)
        session.record(summarize_halves(graph, joint, costs, halves, seconds))
        return halves

    def uuid(self) -> Any:
        """Key of the compile cache: every source file, every setting that matters, what prices are made from."""
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        figures = self.figures or load(device, self.settings).hash
        key = self.settings.cache_key(), self.choice, self.share
        return ("remat", session.source_hash(), key, figures, registry.cache_key())


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
