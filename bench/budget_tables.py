"""What the rows of bench.budget come to: one line per model and table, and where a promise is not kept."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bench.results import MIB, Row

# PyTorch's `activation_memory_budget`, and the share of its smallest peak that remat is asked for too.
TORCH_BUDGETS = (1.0, 0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0)
SMALLER = 0.6
MONOTONE_BUDGETS = 30
CHAIN_LAYERS = (16, 64, 256, 1024)

# What is promised of plans for a budget.
PREDICTED_WITHIN = 0.01
MEDIAN_FLOPS, WORST_FLOPS, WORST_BYTES = 0.5, 1.0, 1.0
SMALLEST_RATIO, SMALLEST_FORWARDS, SMALLER_FORWARDS = 0.55, 1.4, 0.6
CHAIN_EXPONENT, CHAIN_FACTOR = 0.55, 2.2
FEW_NODES, FEW_SECONDS, MANY_NODES, MANY_SECONDS = 2_000, 5.0, 10_000, 30.0
DISTINCT_PLANS, USED_SHARE = 10, 0.85

Lines = list[list[str]]


@dataclass(frozen=True)
class Peaks:
    """The rows of one model's part `peaks`."""

    model: str
    rows: dict[str, Row]

    @cached_property
    def torch(self) -> list[Row]:
        """PyTorch's partition at each of its budgets, the largest budget first."""
        found = (self.rows.get(f"inductor-{fraction}") for fraction in TORCH_BUDGETS)
        return [row for row in found if row is not None and row.peak_bytes is not None]

    @property
    def correct(self) -> list[Row]:
        """Those whose gradients are right."""
        return [row for row in self.torch if row.extra["correct"]]

    def answer(self, peer: Row) -> Row | None:
        """remat's row for the peak that PyTorch had."""
        return self.rows.get(f"remat-{peer.peak_bytes}")

    @property
    def remat(self) -> list[Row]:
        """remat's rows: default, at each of PyTorch's peaks, min and smaller."""
        known = self._asked_of(self.torch)
        return [row for name, row in self.rows.items() if name in known]

    def _asked_of(self, peers: Sequence[Row]) -> set[str]:
        """The variants of remat that there are because of these rows of PyTorch's."""
        return {"remat", "remat-min", f"remat-{self.smaller_budget}", *(f"remat-{row.peak_bytes}" for row in peers)}

    @property
    def measured(self) -> list[Row]:
        """Those of them that there is a measurement of."""
        return [row for row in self.remat if row.peak_bytes is not None]

    @property
    def unmet(self) -> list[Row]:
        """remat's rows that failed although a right plan of PyTorch's has that peak."""
        feasible = self._asked_of(self.correct) - {f"remat-{self.smaller_budget}"}
        return [row for row in self.remat if "failed" in row.extra and row.variant in feasible]

    def ratio(self, field: str, distinct: bool = False) -> float | None:
        """The sum of one field over PyTorch's correct points, remat's over PyTorch's.

        Infinite where remat has no plan for one of them, None where both sums are 0 or a row is missing.
        """
        points = self.correct
        if distinct:
            by_cost = {(row.peak_bytes, row.recomputed_flops, row.recomputed_bytes): row for row in points}
            points = list(by_cost.values())
        answers = [row for peer in points if (row := self.answer(peer)) is not None]
        if len(answers) < len(points):
            return None
        if any(row.peak_bytes is None for row in answers):
            return math.inf
        theirs = sum(getattr(row, field) for row in points)
        ours = sum(getattr(row, field) for row in answers)
        if not theirs:
            return math.inf if ours else None
        return ours / theirs

    @property
    def torch_smallest(self) -> int:
        """PyTorch's smallest peak with right gradients, in bytes."""
        return min((row.peak_bytes for row in self.correct if row.peak_bytes is not None), default=0)

    @property
    def smallest(self) -> Row | None:
        """remat at "min"."""
        row = self.rows.get("remat-min")
        return row if row is not None and row.peak_bytes is not None else None

    @property
    def smallest_ratio(self) -> float | None:
        """remat's smallest peak over PyTorch's."""
        row = self.smallest
        return row.peak_bytes / self.torch_smallest if row and row.peak_bytes and self.torch_smallest else None

    @property
    def smaller_budget(self) -> int:
        """The share of PyTorch's smallest peak that was asked for."""
        return int(SMALLER * self.torch_smallest)

    @property
    def smaller(self) -> Row | None:
        """remat at that share; None where it is below the bound or not measured yet."""
        row = self.rows.get(f"remat-{self.smaller_budget}")
        return None if row is None or "skipped" in row.extra else row

    @property
    def error(self) -> float:
        """The largest relative difference of predicted and measured peak."""
        return max((_prediction_error(row) for row in self.measured if row.predicted_peak_bytes), default=0.0)

    @property
    def over(self) -> list[Row]:
        """Rows whose measured peak exceeds the budget."""
        return [row for row in self.measured if row.budget_bytes and (row.peak_bytes or 0) > row.budget_bytes]

    @property
    def decision_seconds(self) -> float:
        """The slowest decision."""
        return max((row.decision_seconds or 0.0 for row in self.measured), default=0.0)

    @property
    def nodes(self) -> int:
        """Nodes of the prepared joint graph."""
        return max((row.extra["nodes"] for row in self.measured), default=0)


@dataclass(frozen=True)
class Monotone:
    """The row of one model's thirty budgets, the largest first."""

    row: Row

    @property
    def problems(self) -> list[str]:
        """Where a peak rises or recomputation falls although the budget falls."""
        extra, found = self.row.extra, []
        for name, sign in (("measured", 1), ("recompute_seconds", -1)):
            values = [sign * value for value in extra[name]]
            for step in range(1, len(values)):
                if values[step] > values[step - 1]:
                    found.append(f"{name} {extra[name][step - 1]} -> {extra[name][step]} at {extra['budgets'][step]:,}")
        return found

    @property
    def over(self) -> list[tuple[int, int]]:
        """Budgets and measured peaks above them."""
        return [(b, m) for b, m in zip(self.row.extra["budgets"], self.row.extra["measured"], strict=True) if m > b]

    @property
    def least_used(self) -> float | None:
        """The least share of a budget that a plan uses which recomputes something."""
        extra = self.row.extra
        rows = zip(extra["budgets"], extra["measured"], extra["recompute_seconds"], strict=True)
        return min((measured / budget for budget, measured, seconds in rows if seconds > 0), default=None)

    @property
    def unused_budgets(self) -> int:
        """Budgets of which a plan that recomputes something uses less than promised."""
        extra = self.row.extra
        rows = zip(extra["budgets"], extra["measured"], extra["recompute_seconds"], strict=True)
        return sum(measured < USED_SHARE * budget for budget, measured, seconds in rows if seconds > 0)


def peaks_of(rows: Sequence[Row]) -> list[Peaks]:
    """The models of the part `peaks`, in the order of the file."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.variant not in ("monotone", "chains"):
            found.setdefault(row.model, {})[row.variant] = row
    return [Peaks(model, variants) for model, variants in found.items()]


def monotone_of(rows: Sequence[Row]) -> list[Monotone]:
    """The rows of the part `monotone`."""
    return [Monotone(row) for row in rows if row.variant == "monotone"]


def chains_of(rows: Sequence[Row]) -> list[Row]:
    """The rows of the part `chains`, shortest first."""
    return sorted((row for row in rows if row.variant == "chains"), key=lambda row: int(row.extra["layers"]))


def allowed_seconds(nodes: int) -> float:
    """How long a decision may take: between the two promised sizes, on the line through both."""
    share = max(0.0, nodes - FEW_NODES) / (MANY_NODES - FEW_NODES)
    return FEW_SECONDS + share * (MANY_SECONDS - FEW_SECONDS)


# --- tables --------------------------------------------------------------------------------------------------------


def _points(rows: Sequence[Row]) -> Lines:
    lines = [
        ["model", "PyTorch's budget", "its peak, MiB", "its gradients", "it recomputes, forwards", "GB",
         "remat's peak, MiB", "predicted, MiB", "it recomputes, forwards", "GB", "decision, s"]
    ]  # fmt: skip
    for peaks in peaks_of(rows):
        for peer in peaks.torch:
            mine = peaks.answer(peer)
            lines.append(
                [peaks.model, peer.variant.removeprefix("inductor-"), _mib(peer.peak_bytes),
                 "right" if peer.extra["correct"] else "wrong", _forwards(peer), _gb(peer.recomputed_bytes)]
                + (["none"] * 5 if mine is None or mine.peak_bytes is None else
                   [_mib(mine.peak_bytes), _mib(mine.predicted_peak_bytes), _forwards(mine), _gb(mine.recomputed_bytes),
                    f"{mine.decision_seconds:.2f}"])
            )  # fmt: skip
    return lines


def _summary(rows: Sequence[Row]) -> Lines:
    every = peaks_of(rows)
    lines = [
        ["model", "PyTorch's budgets (right)", "recomputed FLOPs, remat / PyTorch", "recomputed bytes, remat / PyTorch",
         "FLOPs, distinct peaks", "bytes, distinct peaks", "predicted vs measured, %", "above budget", "unmet", "nodes",
         "decision, s"]
    ]  # fmt: skip
    for peaks in every:
        lines.append(
            [peaks.model, f"{len(peaks.torch)} ({len(peaks.correct)})", _ratio(peaks.ratio("recomputed_flops")),
             _ratio(peaks.ratio("recomputed_bytes")), _ratio(peaks.ratio("recomputed_flops", True)),
             _ratio(peaks.ratio("recomputed_bytes", True)), f"{100 * peaks.error:.3f}", str(len(peaks.over)),
             str(len(peaks.unmet)), str(peaks.nodes), f"{peaks.decision_seconds:.2f}"]
        )  # fmt: skip
    medians = [
        _ratio(_median([peaks.ratio(field, distinct) for peaks in every]))
        for distinct in (False, True)
        for field in ("recomputed_flops", "recomputed_bytes")
    ]
    return [*lines, ["median", "", *medians, "", "", "", "", ""]]


def _smallest(rows: Sequence[Row]) -> Lines:
    every = peaks_of(rows)
    lines = [
        ["model", "PyTorch's smallest (right), MiB", "remat min, MiB", "ratio", "forwards", "step time, +%",
         "no plan below, MiB", f"at {SMALLER} of PyTorch's, MiB", "forwards", "step time, +%", "no plan below, +%"]
    ]  # fmt: skip
    for peaks in every:
        row, less = peaks.smallest, peaks.smaller
        asked = [_mib(peaks.smaller_budget) if peaks.torch_smallest else "none"]
        if less is None:
            asked += ["below the bound" if f"remat-{peaks.smaller_budget}" in peaks.rows else "not measured", "", ""]
        elif less.peak_bytes is None:
            asked += ["not reached", "", ""]
        else:
            asked.append(_forwards(less))
            asked += [_extra_time(less, field) for field in ("recompute_seconds", "recompute_bound_seconds")]
        least = ["none"] * 5 if row is None else [
            _mib(row.peak_bytes), _ratio(peaks.smallest_ratio), _forwards(row), _extra_time(row, "recompute_seconds"),
            _mib(row.extra["peak_bound_bytes"])
        ]  # fmt: skip
        lines.append([peaks.model, _mib(peaks.torch_smallest), *least, *asked])
    mean = _ratio(_geometric_mean([peaks.smallest_ratio for peaks in every]))
    median = _ratio(_median([_forwards_number(peaks.smaller) for peaks in every if peaks.smaller]))
    return [*lines, ["geometric mean; median", "", "", mean, "", "", "", "", median, "", ""]]


def _monotone(rows: Sequence[Row]) -> Lines:
    lines = [
        ["model", "budgets, MiB", "distinct plans", "monotone", "above budget", "least share of a budget used",
         f"budgets used below {USED_SHARE}", "predicted vs measured, %", "most forwards"]
    ]  # fmt: skip
    for found in monotone_of(rows):
        extra = found.row.extra
        flops = found.row.forward_flops
        error = max(abs(p - m) / m for p, m in zip(extra["predicted"], extra["measured"], strict=True))
        lines.append(
            [found.row.model, f"{_mib(extra['budgets'][-1])} to {_mib(extra['budgets'][0])}",
             str(extra["distinct_plans"]), "no" if found.problems else "yes", str(len(found.over)),
             _ratio(found.least_used), str(found.unused_budgets), f"{100 * error:.3f}",
             f"{max(extra['recomputed_flops']) / flops:.2f}" if flops else "n/a"]
        )  # fmt: skip
    return lines


def _chains(rows: Sequence[Row]) -> Lines:
    found = chains_of(rows)
    lines = [["layers", "peak, activations", "over the square root of layers", "forwards more", "decision, s", "nodes"]]
    for row in found:
        peak, layers = _activations(row), row.extra["layers"]
        lines.append(
            [str(layers), f"{peak:.2f}", f"{peak / math.sqrt(layers):.2f}", f"{row.extra['forwards']:.3f}",
             f"{row.decision_seconds or 0:.2f}", str(row.extra["nodes"])]
        )  # fmt: skip
    return [*lines, ["fitted exponent", _ratio(fitted_exponent(found)), "", "", "", ""]]


# By the name of their marker in the README.
TABLES: dict[str, Callable[[Sequence[Row]], Lines]] = {
    "budget": _summary,
    "budget-min": _smallest,
    "budget-monotone": _monotone,
    "budget-chains": _chains,
    "budget-points": _points,
}


def markdown(name: str, rows: Sequence[Row]) -> str:
    """One of the tables; the first column is text."""
    heading, *body = TABLES[name](rows)
    rule = ["---"] + ["---:"] * (len(heading) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [heading, rule, *body])


def fitted_exponent(rows: Sequence[Row]) -> float | None:
    """The slope of the logarithm of the peak over that of the layers."""
    if len(rows) < 2:
        return None
    layers = [math.log(row.extra["layers"]) for row in rows]
    return float(np.polyfit(layers, [math.log(_activations(row)) for row in rows], 1)[0])


# --- promises ------------------------------------------------------------------------------------------------------


def violations(rows: Sequence[Row]) -> list[str]:
    """Every promise that is not kept, with its numbers."""
    every = peaks_of(rows)
    return [*_broken_peaks(every), *_broken_ratios(every), *_broken_smallest(every), *_broken_monotone(rows),
            *_broken_chains(chains_of(rows))]  # fmt: skip


def _broken_peaks(every: Sequence[Peaks]) -> Iterator[str]:
    for peaks in every:
        for row in peaks.over:
            yield f"1: {row.model} {row.variant}: measured {row.peak_bytes:,} above budget {row.budget_bytes:,}"
        for row in peaks.unmet:
            yield f"1: {row.model} {row.variant}: {row.extra['failed'][:300]}"
        for row in peaks.measured:
            if row.predicted_peak_bytes and _prediction_error(row) > PREDICTED_WITHIN:
                yield (
                    f"1: {row.model} {row.variant}: predicted {row.predicted_peak_bytes:,}, measured "
                    f"{row.peak_bytes:,} ({100 * _prediction_error(row):.2f}%)"
                )
            if not row.extra["correct"]:
                yield f"gradients: {row.model} {row.variant}: {row.gradient_error}, joint {row.extra['joint_error']}"
            if (row.decision_seconds or 0) > allowed_seconds(row.extra["nodes"]):
                yield (
                    f"6: {row.model} {row.variant}: {row.decision_seconds:.2f} s for {row.extra['nodes']:,} nodes, "
                    f"allowed {allowed_seconds(row.extra['nodes']):.2f} s"
                )


def _broken_ratios(every: Sequence[Peaks]) -> Iterator[str]:
    for field, worst in (("recomputed_flops", WORST_FLOPS), ("recomputed_bytes", WORST_BYTES)):
        for distinct in (False, True):
            which = " (distinct peaks)" if distinct else ""
            for peaks in every:
                ratio = peaks.ratio(field, distinct)
                if ratio is not None and ratio > worst:
                    yield f"2: {peaks.model}: {field}{which} are {ratio:.3f} of PyTorch's, allowed {worst}"
    median = _median([peaks.ratio("recomputed_flops") for peaks in every])
    if median is not None and median > MEDIAN_FLOPS:
        yield f"2: recomputed_flops of the median model are {median:.3f} of PyTorch's, allowed {MEDIAN_FLOPS}"


def _broken_smallest(every: Sequence[Peaks]) -> Iterator[str]:
    mean = _geometric_mean([peaks.smallest_ratio for peaks in every])
    if mean is not None and mean > SMALLEST_RATIO:
        yield f"3: smallest peaks are {mean:.3f} of PyTorch's in the geometric mean, allowed {SMALLEST_RATIO}"
    for peaks in every:
        forwards = _forwards_number(peaks.smallest)
        if forwards is not None and forwards > SMALLEST_FORWARDS:
            yield f"3: {peaks.model}: min recomputes {forwards:.3f} forwards, allowed {SMALLEST_FORWARDS}"
        if peaks.smaller is not None and peaks.smaller.peak_bytes is None:
            yield f"3: {peaks.model}: {SMALLER} of PyTorch's smallest peak was not reached, the bound allows it"
    median = _median([_forwards_number(peaks.smaller) for peaks in every if peaks.smaller])
    if median is not None and median > SMALLER_FORWARDS:
        yield f"3: at {SMALLER} the median model recomputes {median:.3f} forwards, allowed {SMALLER_FORWARDS}"


def _broken_monotone(rows: Sequence[Row]) -> Iterator[str]:
    for found in monotone_of(rows):
        model, extra = found.row.model, found.row.extra
        yield from (f"7: {model}: {problem}" for problem in found.problems)
        yield from (f"1: {model} monotone: measured {peak:,} above budget {budget:,}" for budget, peak in found.over)
        if extra["distinct_plans"] < DISTINCT_PLANS:
            yield f"7: {model}: {extra['distinct_plans']} distinct plans, promised {DISTINCT_PLANS}"
        if found.least_used is not None and found.least_used < USED_SHARE:
            yield (
                f"7: {model}: as little as {found.least_used:.3f} of a budget used ({found.unused_budgets} below "
                f"the promised {USED_SHARE})"
            )


def _broken_chains(found: Sequence[Row]) -> Iterator[str]:
    exponent = fitted_exponent(found)
    if exponent is not None and exponent > CHAIN_EXPONENT:
        yield f"4: fitted exponent {exponent:.3f}, allowed {CHAIN_EXPONENT}"
    for row in found:
        factor = _activations(row) / math.sqrt(row.extra["layers"])
        if row.extra["layers"] == max(CHAIN_LAYERS) and factor > CHAIN_FACTOR:
            yield f"4: {row.extra['layers']} layers: {factor:.3f} times the square root, allowed {CHAIN_FACTOR}"
        if (row.decision_seconds or 0) > allowed_seconds(row.extra["nodes"]):
            yield f"6: {row.model} chains: {row.decision_seconds:.2f} s for {row.extra['nodes']:,} nodes"


# --- numbers and cells ---------------------------------------------------------------------------------------------


def _prediction_error(row: Row) -> float:
    return abs((row.predicted_peak_bytes or 0) - (row.peak_bytes or 0)) / (row.peak_bytes or 1)


def _activations(row: Row) -> float:
    return (row.peak_bytes or 0) / float(row.extra["activation_bytes"])


def _forwards_number(row: Row | None) -> float | None:
    """Recomputed FLOPs in forwards; infinite where there is no plan, None where the forward has no FLOPs that count."""
    if row is None:
        return None
    if row.peak_bytes is None:
        return math.inf
    return row.recomputed_flops / row.forward_flops if row.forward_flops and row.recomputed_flops is not None else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _geometric_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


def _mib(size: int | None) -> str:
    return "none" if size is None else f"{size / MIB:.2f}"


def _gb(size: int | None) -> str:
    return "none" if size is None else f"{size / 1e9:.3f}"


def _ratio(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _forwards(row: Row) -> str:
    number = _forwards_number(row)
    return "n/a" if number is None else f"{number:.3f}"


def _extra_time(row: Row, field: str) -> str:
    """Predicted time of recomputation in percent of the step without any."""
    return f"{100 * row.extra[field] / row.extra['step_seconds']:.1f}"
