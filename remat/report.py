"""What a user is told about a plan. Data first; printing is a thin layer over it."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table
from torch import fx

from remat import costs as cost_model
from remat import ops
from remat.costs import MIB, Costs
from remat.joint import JointGraph
from remat.ops import Kind
from remat.plans import Candidate, Planner
from remat.rules import Rules
from remat.several import Choice, Memory

logger = logging.getLogger("remat")

# How many of the values alive at the peak a summary names.
SHOWN_AT_PEAK: Final = 12


@dataclass(frozen=True)
class SavedValue:
    """One value kept for the backward: its node, operator, bytes (0: an input's memory), why, and the user's line."""

    name: str
    operator: str
    bytes: int
    reason: str
    source: str


@dataclass(frozen=True)
class PlanSummary:
    """What became of one joint graph.

    origin: "planned" now, "cached" (the compiled code and this summary come from disk), or "fallback" (PyTorch's
    partitioner took over; `reason` says why). Sizes in bytes, `recomputed_*` is what the backward runs again,
    `torch_saved_bytes` what PyTorch's default partition of this graph would save. `alive_at_peak` names the largest
    values alive at the predicted peak: name, role, bytes.

    Under a budget: `budget_bytes` is the peak allowed (0: min), `smallest_peak_bytes` the smallest found,
    `peak_bound_bytes` what no plan goes below. `recompute_seconds` is the predicted time of what runs again, op by op,
    `recompute_bound_seconds` what no plan within the budget goes below, `step_seconds` the time of everything once; the
    bounds are 0 under Inductor, whose memory the plain problem does not describe. `exact_peak_bytes` is the peak of the
    code that Inductor generates, where it was asked for (see the setting `exact`); 0 elsewhere.

    Of a step of several graphs (`step_graphs` calls; 0: not known to be one) `step_peak_bytes` is the peak of all of
    them together, which the budget is for. What they are planned together by: `held_bytes`, outputs and saved values,
    and that as predicted; `reference`, what the plan takes that fractions are of; `choices`, what other plans would.
    """

    graph: str
    origin: str
    solver: str = ""
    nodes: int = 0
    saved_bytes: int = 0
    saved_values: int = 0
    recomputed_ops: int = 0
    recomputed_flops: int = 0
    recomputed_bytes: int = 0
    forward_flops: int = 0
    torch_saved_bytes: int = 0
    predicted_peak_bytes: int = 0
    exact_peak_bytes: int = 0
    torch_predicted_peak_bytes: int = 0
    peak_at: str = ""
    alive_at_peak: tuple[tuple[str, str, int], ...] = ()
    held_bytes: int = 0
    predicted_held_bytes: int = 0
    step_graphs: int = 0
    step_peak_bytes: int = 0
    reference: Memory | None = None
    choices: tuple[Choice, ...] = ()
    budget_bytes: int = 0
    smallest_peak_bytes: int = 0
    peak_bound_bytes: int = 0
    recompute_seconds: float = 0.0
    recompute_bound_seconds: float = 0.0
    step_seconds: float = 0.0
    decision_seconds: float = 0.0
    reason: str = ""
    saved: tuple[SavedValue, ...] = ()

    def line(self) -> str:
        """The plan in one line. A cached plan prints the same line as when it was made, but for its origin."""
        if self.origin == "fallback":
            return f"remat: graph {self.graph}: PyTorch's partitioner ({self.reason})"
        return (
            f"remat: graph {self.graph}: {self.nodes} nodes, saved {_mib(self.saved_bytes)} in {self.saved_values} "
            f"values (PyTorch {_mib(self.torch_saved_bytes)}), predicted peak {_mib(self.predicted_peak_bytes)} at "
            f"{self.peak_at} (PyTorch {_mib(self.torch_predicted_peak_bytes)}), {self.recomputed_ops} operators "
            f"recomputed, plan by {self.solver} in {self.decision_seconds:.2f} s ({self.origin}){self._certified()}"
        )

    def _certified(self) -> str:
        if not self.step_seconds or not self.smallest_peak_bytes:
            return ""
        budget = f"budget {_mib(self.budget_bytes)}" if self.budget_bytes else "budget min"
        exact = f" (exact peak {_mib(self.exact_peak_bytes)})" if self.exact_peak_bytes else ""
        if self.step_graphs:
            budget += f" for a step of {self.step_graphs} graphs, whose peak is {_mib(self.step_peak_bytes)}"
        text = f"; {budget}{exact}, smallest peak {_mib(self.smallest_peak_bytes)}"
        if not self.peak_bound_bytes:
            return text
        extra, least = self.recompute_seconds / self.step_seconds, self.recompute_bound_seconds / self.step_seconds
        return f"{text} (none below {_mib(self.peak_bound_bytes)}), step +{extra:.1%} (none below +{least:.1%})"


def _mib(count: int) -> str:
    return f"{count / MIB:.2f} MiB"


def summarize(
    graph: str,
    candidate: Candidate,
    reference: Candidate,
    planner: Planner,
    seconds: float,
    exact: Memory | None = None,
) -> PlanSummary:
    """Gather the summary of a chosen plan.

    reference: PyTorch's. seconds: the time that deciding took. exact: what Inductor's code takes, where that is known.
    """
    plan, costs, certificate = candidate.plan, planner.costs, candidate.certificate
    again = plan.recomputed
    alive = candidate.timeline.alive_at_peak[:SHOWN_AT_PEAK]
    summary = PlanSummary(
        graph=graph,
        origin="planned",
        solver=plan.solver,
        nodes=len(plan.joint.nodes),
        saved_bytes=candidate.saved_bytes,
        saved_values=len(plan.saved),
        recomputed_ops=len(again),
        recomputed_flops=sum(costs.flops.get(node, 0) for node in again),
        recomputed_bytes=sum(cost_model.moved_bytes(node) for node in again),
        forward_flops=sum(count for node, count in costs.flops.items() if node in plan.forward_set),
        torch_saved_bytes=reference.saved_bytes,
        predicted_peak_bytes=candidate.peak_bytes,
        torch_predicted_peak_bytes=reference.peak_bytes,
        peak_at=candidate.timeline.peak_at,
        alive_at_peak=tuple((life.name, life.role.value, life.bytes) for life in alive),
        decision_seconds=seconds,
        saved=tuple(_saved_value(node, costs, planner.rules) for node in plan.saved),
    )
    if certificate is None:
        return summary
    memory = exact or candidate.timeline.memory
    share = planner.share
    return dataclasses.replace(
        summary,
        exact_peak_bytes=exact.peak_bytes if exact else 0,
        held_bytes=memory.held_bytes,
        predicted_held_bytes=candidate.timeline.held_bytes,
        step_graphs=share.graphs if share else 0,
        step_peak_bytes=planner.peaks.of_step(memory),
        reference=planner.reference_memory,
        choices=planner.peaks.choices,
        **dataclasses.asdict(certificate),
    )


def summarize_halves(
    graph: str, joint: JointGraph, costs: Costs, halves: tuple[fx.GraphModule, fx.GraphModule], seconds: float
) -> PlanSummary:
    """The summary of a partition that another made, from the names of its nodes; no peak is predicted."""
    forward, backward = ({node.name for node in half.graph.nodes if node.op == "call_function"} for half in halves)
    again = [node for node in joint.nodes if node.name in forward & backward and node.op == "call_function"]
    again = [node for node in again if not ops.is_item(node) and ops.kind(node) not in (Kind.VIEW, Kind.SYMBOLIC)]
    return PlanSummary(
        graph=graph,
        origin="planned",
        solver="torch",
        nodes=len(joint.nodes),
        recomputed_ops=len(again),
        recomputed_flops=sum(costs.flops.get(node, 0) for node in again),
        recomputed_bytes=sum(cost_model.moved_bytes(node) for node in again),
        forward_flops=sum(count for node, count in costs.flops.items() if node.name in forward),
        decision_seconds=seconds,
    )


def _saved_value(node: fx.Node, costs: Costs, rules: Rules) -> SavedValue:
    forbidden = rules.no_recompute.get(node)
    if forbidden:
        reason = f"may not be recomputed: {forbidden}"
    else:
        save, again = costs.save_price(node), costs.recompute_price(node)
        reason = f"saving costs {save * 1e-9:.3g} us; running it again {again * 1e-9:.3g} us, and what it needs"
    return SavedValue(node.name, ops.name(node), cost_model.saved_bytes(node), reason, ops.user_source(node))


def show(summary: PlanSummary, log: str) -> None:
    """Print as much as the setting `log` asks for, on stderr."""
    if log == "warn":
        logger.debug("%s", summary.line())
        return
    print(summary.line(), file=sys.stderr)
    if log == "values" and summary.saved:
        console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)
        table = Table("saved value", "operator", "bytes", "why", "source")
        for value in summary.saved:
            table.add_row(value.name, value.operator, f"{value.bytes:,}", value.reason, value.source)
        console.print(table)
        peak = Table("alive at the predicted peak", "as", "bytes")
        for name, role, count in summary.alive_at_peak:
            peak.add_row(name, role, f"{count:,}")
        console.print(peak)


def to_json(summaries: list[PlanSummary]) -> str:
    """Summaries as JSON text."""
    return json.dumps([dataclasses.asdict(summary) for summary in summaries], indent=1)


def from_json(text: str) -> list[PlanSummary]:
    """Summaries from JSON text; those of a plan are marked as cached."""
    found = []
    for row in json.loads(text):
        saved = tuple(SavedValue(**value) for value in row.pop("saved"))
        row["alive_at_peak"] = tuple(tuple(value) for value in row["alive_at_peak"])
        row["reference"] = row["reference"] and Memory(*row["reference"])
        row["choices"] = tuple(Choice(Memory(*memory), seconds) for memory, seconds in row["choices"])
        summary = PlanSummary(**row, saved=saved)
        found.append(summary if summary.origin == "fallback" else dataclasses.replace(summary, origin="cached"))
    return found
