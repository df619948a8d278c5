"""What the rows of bench.hold come to: budgets that held, peers that remat was asked to fit under, compile times."""

from collections.abc import Callable, Sequence

from bench.results import MIB, Row

FRACTION, PEER, COMPILE = "fraction", "peer", "compile"
FRACTIONS = ("remat-0.75", "remat-0.5", "remat-0.35")
PEERS = ("eager", "checkpoint", "inductor", "inductor-0.7", "inductor-0.5", "inductor-0.3", "inductor-0.1")
COMPILED = ("inductor", "remat", "remat-0.5")
# Gradients further than this from float64's are wrong, not rounded.
TOLERANCE = 0.02
# A step may take this much of the peer's.
SLOWER = 1.03

Lines = list[list[str]]


def of_part(rows: Sequence[Row], part: str) -> list[Row]:
    """The rows of one part."""
    return [row for row in rows if row.extra["part"] == part]


def fraction_cells(rows: Sequence[Row]) -> Lines:
    """A line for each model and fraction: budget, predicted, exact and measured peak."""
    lines = [["model", "variant", "budget, MiB", "predicted, MiB", "exact, MiB", "measured, MiB", "predicted, off by",
              "recomputed FLOPs, %", "held"]]  # fmt: skip
    for row in of_part(rows, FRACTION):
        if "unreachable" in row.extra:
            lines.append([row.model, row.variant, *["n/a"] * 6, "not reachable"])
            continue
        assert row.predicted_peak_bytes and row.peak_bytes and row.budget_bytes
        exact = row.extra["exact_peak_bytes"]
        sizes = (row.budget_bytes, row.predicted_peak_bytes, exact, row.peak_bytes)
        off = f"{100 * (row.predicted_peak_bytes / row.peak_bytes - 1):+.1f}%"
        held = "yes" if row.peak_bytes <= row.budget_bytes else "no"
        lines.append([row.model, row.variant, *(f"{size / MIB:.2f}" for size in sizes), off, _again(row), held])
    return lines


def peer_cells(rows: Sequence[Row]) -> Lines:
    """A line for each model and peer: its peak, remat's when asked for it, and the ratio of their times."""
    lines = [["model", "variant", "its peak, MiB", "remat's peak, MiB", "remat's step over its", "recomputed FLOPs, %",
              "within its peak", "within 1.03 of its time", "its gradients"]]  # fmt: skip
    for row in of_part(rows, PEER):
        assert row.budget_bytes
        error = row.extra["peer_error"]
        right = "n/a" if error is None else "right" if error < TOLERANCE else "wrong"
        peak = f"{row.budget_bytes / MIB:.2f}"
        if row.peak_bytes is None or row.step_ratio is None or row.step_ratio_ci is None:
            lines.append([row.model, row.variant, peak, "not reachable", "n/a", "n/a", "no", "n/a", right])
            continue
        ratio = "{:.3f} [{:.3f}, {:.3f}]".format(row.step_ratio, *row.step_ratio_ci)
        within = ("yes" if row.peak_bytes <= row.budget_bytes else "no", "yes" if row.step_ratio <= SLOWER else "no")
        lines.append([row.model, row.variant, peak, f"{row.peak_bytes / MIB:.2f}", ratio, _again(row), *within, right])
    return lines


def compile_cells(rows: Sequence[Row]) -> Lines:
    """A line for each model: seconds of the first step without and with a budget, from an empty and a full cache."""
    lines = [["model", *(f"{name}, s" for name in COMPILED), "budget over none", *(f"{n}, warm, s" for n in COMPILED)]]
    models = list(dict.fromkeys(row.model for row in of_part(rows, COMPILE)))
    for model in models:
        found = {row.variant: row for row in of_part(rows, COMPILE) if row.model == model}
        cold = [found[name].compile_seconds if name in found else None for name in COMPILED]
        warm = [found[name].extra.get("warm_seconds") if name in found else None for name in COMPILED]
        ratio = f"{cold[2] / cold[1]:.2f}" if cold[1] and cold[2] else "n/a"
        lines.append([model, *map(_seconds, cold), ratio, *map(_seconds, warm)])
    return lines


def _seconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f}"


def _again(row: Row) -> str:
    if row.recomputed_flops is None or not row.forward_flops:
        return "n/a"
    return f"{100 * row.recomputed_flops / row.forward_flops:.0f}"


TABLES: dict[str, Callable[[Sequence[Row]], Lines]] = {
    "hold": fraction_cells,
    "hold-peers": peer_cells,
    "hold-compile": compile_cells,
}
