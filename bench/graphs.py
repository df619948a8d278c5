"""The planner on public graphs against published solvers: recompute cost within a share of the baseline's peak.

    python -m bench.graphs shared/graphs --budget 0.8

Every *.json in the folder is a graph: {"name", "nodes": [{"bytes", "cost"}], "edges": [[producer, consumer]],
"order": [...]}. One process, one core; rows are written as they come.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import results
from remat.errors import BudgetUnreachable
from remat.problem import Problem, single_valued
from remat.solve import schedule

VARIANT = "remat-graph"
PLANNER = ("problem", "schedule", "search", "ordering", "anneal", "solve")
SOURCES = ("bench/graphs.py", *(f"remat/{name}.py" for name in PLANNER))
# Columns of text when the output goes into a file or a pipe.
PLAIN_WIDTH = 180


@dataclass(frozen=True)
class Published:
    """A solver's figures: cost increase in percent and seconds, on its authors' machine."""

    solver: str
    percent: float
    seconds: float


# At 80% of the baseline's peak: Moccasin (Bartan et al., ICML 2023), which also ran Checkmate's MILP (Jain et al.,
# MLSys 2020), and FastSA, which may reorder as we may; as told by the README of the graphs. Where solvers agree on the
# cost, the fastest comes first.
PUBLISHED_BUDGET = 0.8
PUBLISHED_COLUMNS = ("published +%", "its seconds", "by")
PUBLISHED: dict[str, tuple[Published, ...]] = {
    "rl1": (Published("FastSA", 0.3, 11.5), Published("Moccasin", 2.3, 9.5), Published("Checkmate", 2.3, 22.7)),
    "rl2": (Published("FastSA", 0.0, 15.0), Published("Moccasin", 4.9, 639.5)),
    "rl3": (Published("FastSA", 2.3, 20.9), Published("Moccasin", 3.4, 1804.8)),
    "rl4": (Published("FastSA", 2.5, 36.3), Published("Moccasin", 3.4, 3611.8)),
    "fcn8": (Published("Moccasin", 0.1, 3.1), Published("Checkmate", 0.1, 5.6), Published("FastSA", 0.1, 9.7)),
    "resnet50": (
        Published("Moccasin", 0.3, 69.3),
        Published("Checkmate", 0.3, 485.3),
        Published("FastSA", 0.4, 10.9),
    ),
}


@dataclass(frozen=True)
class Graph:
    """A graph as its file tells it."""

    name: str
    size: list[int]
    cost: list[int]
    edges: list[tuple[int, int]]
    order: list[int]

    @classmethod
    def read(cls, path: Path) -> "Graph":
        data = json.loads(path.read_text())
        return cls(
            data["name"],
            [node["bytes"] for node in data["nodes"]],
            [node["cost"] for node in data["nodes"]],
            [(tail, head) for tail, head in data["edges"]],
            data["order"],
        )

    @property
    def problem(self) -> Problem:
        """What the planner's result is judged by."""
        return single_valued(self.size, self.cost, self.edges, self.order)


def main() -> int:
    arguments = _parse_arguments()
    rows = []
    for path in sorted(arguments.folder.glob("*.json")):
        graph = Graph.read(path)
        if arguments.graphs and graph.name not in arguments.graphs:
            continue
        print(f"planning {graph.name}", file=sys.stderr, flush=True)
        row = measure(graph, arguments.budget, arguments.effort)
        results.write_row(arguments.json, row)
        rows.append(row)
    Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH).print(_table(rows, arguments.budget))
    return 0


def measure(graph: Graph, share: float, effort: int) -> results.Row:
    """Plan one graph, and judge the plan by the problem's own rules."""
    problem = graph.problem
    baseline_peak = problem.peak(graph.order)
    budget = int(share * baseline_peak)
    sequence: list[int] | None
    start = time.perf_counter()
    try:
        sequence = schedule(graph.size, graph.cost, graph.edges, graph.order, budget, effort=effort)
    except BudgetUnreachable:
        sequence = None
    seconds = time.perf_counter() - start
    found: dict[str, Any] = {}
    peak = None
    if sequence is not None:
        why, peak = problem.why_illegal(sequence), problem.peak(sequence)
        if why is not None or peak > budget:
            raise AssertionError(f"{graph.name}: {why or f'a peak of {peak} bytes in a budget of {budget}'}")
        added = problem.recompute_cost(sequence)
        found = {
            "recomputed_cost": added,
            "increase_percent": 100 * added / problem.baseline_cost,
            "runs": len(sequence),
        }
    return results.Row(
        model=graph.name,
        variant=VARIANT,
        options={"budget": share, "effort": effort},
        **results.provenance("bench.graphs", "cpu"),
        budget_bytes=budget,
        predicted_peak_bytes=peak,
        decision_seconds=seconds,
        extra={
            "nodes": len(graph.size),
            "edges": len(graph.edges),
            "baseline_peak_bytes": baseline_peak,
            "baseline_cost": problem.baseline_cost,
            **found,
            **_published(graph.name, share),
            "sources": results.source_hash(SOURCES),
        },
    )


def _published(name: str, share: float) -> dict[str, Any]:
    """The best published figures for a graph at this budget, if there are any."""
    known = PUBLISHED.get(name, ()) if share == PUBLISHED_BUDGET else ()
    if not known:
        return {}
    best = min(known, key=lambda row: row.percent)
    return {"published": {"solver": best.solver, "increase_percent": best.percent, "seconds": best.seconds}}


def cells(rows: Sequence[results.Row]) -> list[list[str]]:
    """A heading and one line per graph."""
    lines = [["graph", "nodes", "edges", "baseline peak", "budget", "cost +%", "seconds", *PUBLISHED_COLUMNS]]
    for row in rows:
        extra, published = row.extra, row.extra.get("published")
        increase = extra.get("increase_percent")
        lines.append(
            [
                row.model,
                str(extra["nodes"]),
                str(extra["edges"]),
                f"{extra['baseline_peak_bytes']:,}",
                f"{row.budget_bytes:,}",
                "unreached" if increase is None else f"{increase:.2f}",
                f"{row.decision_seconds:.1f}",
                f"{published['increase_percent']:.1f}" if published else "",
                f"{published['seconds']:.1f}" if published else "",
                published["solver"] if published else "",
            ]
        )
    return lines


def _table(rows: list[results.Row], share: float) -> Table:
    heading, *body = cells(rows)
    table = Table(caption=f"within {share:.0%} of the baseline's peak; published figures are of other machines")
    for name in heading:
        table.add_column(name, justify="left" if name in ("graph", "by") else "right")
    for line in body:
        table.add_row(*line)
    return table


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.graphs", description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="holds the graphs, a *.json each")
    parser.add_argument("--graphs", type=results.listed, help="only these, comma-separated")
    parser.add_argument("--budget", type=float, default=PUBLISHED_BUDGET, help="share of the baseline's peak")
    parser.add_argument("--effort", type=int, default=2, help="rounds of the planner")
    parser.add_argument("--json", type=Path, default=results.RESULTS / "graphs.json")
    arguments = parser.parse_args()
    if not 0 < arguments.budget <= 1:
        parser.error("a budget is a share between 0 and 1")
    if not any(arguments.folder.glob("*.json")):
        parser.error(f"no *.json in {arguments.folder}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
