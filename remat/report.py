"""What a user is told about a plan. Data first; printing is a thin layer over it."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from torch import fx

from remat import costs as cost_model
from remat import ops
from remat.costs import MIB, Costs
from remat.plans import Candidate
from remat.rules import Rules

logger = logging.getLogger("remat")


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
    `torch_saved_bytes` what PyTorch's default partition of this graph would save.
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
    torch_predicted_peak_bytes: int = 0
    peak_at: str = ""
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
            f"recomputed, plan by {self.solver} in {self.decision_seconds:.2f} s ({self.origin})"
        )


def _mib(count: int) -> str:
    return f"{count / MIB:.2f} MiB"


def summarize(
    graph: str, candidate: Candidate, reference: Candidate, costs: Costs, rules: Rules, decision_seconds: float
) -> PlanSummary:
    """Gather the summary of a chosen plan."""
    plan = candidate.plan
    again = plan.recomputed
    return PlanSummary(
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
        decision_seconds=decision_seconds,
        saved=tuple(_saved_value(node, costs, rules) for node in plan.saved),
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
        table = Table("saved value", "operator", "bytes", "why", "source")
        for value in summary.saved:
            table.add_row(value.name, value.operator, f"{value.bytes:,}", value.reason, value.source)
        Console(stderr=True, width=None if sys.stderr.isatty() else 200).print(table)


def to_json(summaries: list[PlanSummary]) -> str:
    """Summaries as JSON text."""
    return json.dumps([dataclasses.asdict(summary) for summary in summaries], indent=1)


def from_json(text: str) -> list[PlanSummary]:
    """Summaries from JSON text; those of a plan are marked as cached."""
    found = []
    for row in json.loads(text):
        saved = tuple(SavedValue(**value) for value in row.pop("saved"))
        summary = PlanSummary(**row, saved=saved)
        found.append(summary if summary.origin == "fallback" else dataclasses.replace(summary, origin="cached"))
    return found
