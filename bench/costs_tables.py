"""What the rows of bench.costs come to: how well predictions order plans and by how much they are off."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.results import MIB, Row
from bench.timing import bootstrap_interval

PREDICT = "predict"
PRICES = ("roofline", "profile", "learned")
PLANS: dict[str, dict[str, Any]] = {
    "torch": {"partitioner": "torch"},
    "remat": {},
    "remat-0.8": {"budget": 0.8},
    "remat-0.6": {"budget": 0.6},
    "remat-min": {"budget": "min"},
    "fewest": {"memory_weight": 1000.0},
    "random-0": {"plan_seed": 0},
    "random-1": {"plan_seed": 1},
}


def of_part(rows: Sequence[Row], part: str) -> dict[str, list[Row]]:
    """The rows of one part, by model."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.extra.get("part") == part:
            found.setdefault(row.model, []).append(row)
    return found


def median_seconds(row: Row) -> float:
    """The median of a plan's steps."""
    return float(np.median(row.extra["seconds"]))


def differing(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Pairs of plans, the faster first, whose times differ by more than the noise.

    That is where the 95% interval of the median of the ratio, round by round, does not hold 1.
    """
    for one, two in itertools.combinations(rows, 2):
        ratios = np.array(one.extra["seconds"]) / np.array(two.extra["seconds"])
        low, high = bootstrap_interval(ratios)
        if high < 1:
            yield one, two
        elif low > 1:
            yield two, one


def share_ordered(rows: Sequence[Row], price: str) -> tuple[int, int]:
    """How many of the pairs that differ are predicted in the right order, and how many there are."""
    pairs = list(differing(rows))
    right = sum(a.extra["predicted"][price] < b.extra["predicted"][price] for a, b in pairs)
    return right, len(pairs)


def errors(rows: Sequence[Row], price: str) -> list[float]:
    """|predicted / measured - 1| of each plan."""
    return [abs(row.extra["predicted"][price] / median_seconds(row) - 1) for row in rows]


def regret(rows: Sequence[Row], price: str) -> float:
    """Time of the plan that is predicted to be fastest over that of the fastest, less 1."""
    picked = min(rows, key=lambda row: float(row.extra["predicted"][price]))
    return median_seconds(picked) / min(map(median_seconds, rows)) - 1


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each model and one for all: spread of the plans, and of each source of prices order, error, regret."""
    heading = ["model", "plans", "slowest / fastest", "pairs that differ"]
    for price in PRICES:
        heading += [f"{price}: ordered", "error", "regret"]
    lines = [heading]
    models = of_part(rows, PREDICT)
    for model, found in models.items():
        times = sorted(map(median_seconds, found))
        line = [model, str(len(found)), f"{times[-1] / times[0]:.2f}", str(len(list(differing(found))))]
        for price in PRICES:
            right, count = share_ordered(found, price)
            line += [f"{100 * right / max(count, 1):.0f}%", f"{100 * statistics.median(errors(found, price)):.0f}%"]
            line.append(f"{100 * regret(found, price):.1f}%")
        lines.append(line)
    if models:
        counts = [share_ordered(found, PRICES[0])[1] for found in models.values()]
        line = ["all", str(sum(map(len, models.values()))), "", str(sum(counts))]
        for price in PRICES:
            right = sum(share_ordered(found, price)[0] for found in models.values())
            off = [error for found in models.values() for error in errors(found, price)]
            worst = max(regret(found, price) for found in models.values())
            line += [f"{100 * right / max(sum(counts), 1):.0f}%", f"{100 * statistics.median(off):.0f}%"]
            line.append(f"{100 * worst:.1f}% at most")
        lines.append(line)
    return lines


RATIOS = ("traffic_bytes", "kernels", "launches", "extern_flops", "peak_bytes")


def default_cells(rows: Sequence[Row]) -> list[list[str]]:
    """The default plan over Inductor's: time, and what the generated code takes; and where the time goes."""
    heading = ["model", "step time ratio", "predicted", "traffic", "kernels", "launches", "extern FLOPs", "peak"]
    heading += ["peak, MiB", "of the predicted change: outside", "traffic-bound", "arithmetic-bound", "decision, s"]
    lines = [heading]
    ratios: dict[str, list[float]] = {name: [] for name in (*RATIOS, "time")}
    for (row,) in of_part(rows, "default").values():
        mine, theirs = row.extra["figures"], row.extra["peer_figures"]
        for name in RATIOS:
            ratios[name].append(mine[name] / theirs[name] if theirs[name] else 1.0)
        assert row.step_ratio is not None and row.step_ratio_ci is not None
        ratios["time"].append(row.step_ratio)
        predicted, peers = row.extra["predicted"], row.extra["peer_predicted"]
        total = sum(peers.values())
        line = [row.model, f"{row.step_ratio:.3f} [{row.step_ratio_ci[0]:.3f}, {row.step_ratio_ci[1]:.3f}]"]
        line += [f"{sum(predicted.values()) / total:.3f}", *(f"{ratios[name][-1]:.3f}" for name in RATIOS)]
        line.append(f"{mine['peak_bytes'] / MIB:.2f}")
        parts = ("outside", "traffic", "arithmetic")
        line += [f"{100 * (predicted[part] - peers[part]) / total:+.1f}%" for part in parts]
        lines.append([*line, f"{row.decision_seconds:.1f}"])
    if ratios["time"]:
        means = [f"{float(np.exp(np.mean(np.log(ratios[name])))):.3f}" for name in RATIOS]
        line = ["median; geometric means", f"{statistics.median(ratios['time']):.3f}", "", *means]
        lines.append([*line, *[""] * (len(heading) - len(line))])
    return lines


def half_cells(rows: Sequence[Row]) -> list[list[str]]:
    """The plan at budget 0.5 and random plans of no higher peak: each one's time over the fastest's."""
    lines = [["model", "variant", "peak, MiB", "step, ms", "over the fastest"]]
    for model, found in of_part(rows, "half").items():
        fastest = min(map(median_seconds, found))
        for row in found:
            assert row.peak_bytes is not None
            times = f"{1e3 * median_seconds(row):.1f}", f"{median_seconds(row) / fastest:.3f}"
            lines.append([model, row.variant, f"{row.peak_bytes / MIB:.2f}", *times])
    return lines
