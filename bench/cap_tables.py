"""What the rows of bench.cap come to: what remat did under the cap, and where the others ran out of memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.results import MIB, Row

CAP, OURS, EAGER = "cap", "remat", "eager"
# What the training under the cap is compared with, besides eager mode.
UNCAPPED, DEFAULT_PLAN = "uncapped", "remat's default plan"
TORCH_BUDGETS = tuple(tenths / 10 for tenths in range(10, -1, -1))
DEFAULT = f"inductor-{TORCH_BUDGETS[0]}"
PEERS = (EAGER, *(f"inductor-{budget}" for budget in TORCH_BUDGETS))

Lines = list[list[str]]


@dataclass(frozen=True)
class Caps:
    """The rows of one model, run by one executor, that were measured under its present cap."""

    model: str
    inner: str
    cap_bytes: int
    rows: dict[str, Row]


def caps_of(rows: Sequence[Row]) -> list[Caps]:
    """One for each row that holds a cap."""
    found = []
    for cap in rows:
        if cap.variant != CAP or cap.budget_bytes is None:
            continue
        inner = cap.extra["inner"]
        same = [row for row in rows if (row.model, row.extra["inner"]) == (cap.model, inner) and row.variant != CAP]
        current = {row.variant: row for row in same if row.budget_bytes == cap.budget_bytes}
        found.append(Caps(cap.model, inner, cap.budget_bytes, current))
    return found


def outcome(row: Row) -> str:
    """In words: where memory ran out, or that all steps finished, or that they did with wrong gradients."""
    refusal = row.extra["refusal"]
    if refusal is None:
        return "finished" if row.extra["right"] else "wrong gradients"
    return f"out of memory, {refusal['half']} of step {refusal['step']}"


def cells(rows: Sequence[Row]) -> Lines:
    """A line for each model and executor: the cap, remat's training under it, and how many peers finished."""
    heading = ["model", "run by", "cap, MiB", "of PyTorch's default peak", "highest peak, MiB", "steps"]
    heading += [f"losses and weights against: {UNCAPPED}", DEFAULT_PLAN, EAGER, "eager against itself, moved by 1e-7"]
    heading += ["others: out of memory", "wrong gradients", "finished"]
    lines = [heading]
    for caps in caps_of(rows):
        mine = caps.rows.get(OURS)
        if mine is None:
            continue
        others = [outcome(row) for name, row in caps.rows.items() if name in PEERS]
        counts = (sum(text.startswith(start) for text in others) for start in ("out", "wrong", "finished"))
        line = [caps.model, caps.inner, f"{caps.cap_bytes / MIB:.2f}", _share(caps.cap_bytes, caps.rows.get(DEFAULT))]
        line.append(f"{mine.extra['capped_peak_bytes'] / MIB:.2f}")
        line.append(f"{mine.extra['steps']} of {mine.extra['steps_asked']}")
        lines.append([*line, *_compared(mine), *map(str, counts)])
    return lines


def _share(cap_bytes: int, default: Row | None) -> str:
    if default is None or default.peak_bytes is None:
        return "n/a"
    return f"{100 * cap_bytes / default.peak_bytes:.0f}%"


def _compared(mine: Row) -> list[str]:
    """Against each other training: equal, or the largest relative difference between the losses of a step."""
    found = mine.extra.get("compared", {})
    differences = (found.get(name) for name in (UNCAPPED, DEFAULT_PLAN, EAGER))
    told = ["n/a" if one is None else "equal" if one["equal"] else f"{one['distance']:.1e}" for one in differences]
    return [*told, f"{mine.extra['rounding']:.1e}" if "rounding" in mine.extra else "n/a"]


def peer_cells(rows: Sequence[Row]) -> Lines:
    """A line for each model and executor, a column for each peer: what became of it, and the peak it has by itself."""
    lines = [["model", "run by", "cap, MiB", *PEERS]]
    for caps in caps_of(rows):
        found = (caps.rows.get(name) for name in PEERS)
        line = [caps.model, caps.inner, f"{caps.cap_bytes / MIB:.2f}"]
        lines.append([*line, *("n/a" if row is None else f"{outcome(row)} ({_peak(row)})" for row in found)])
    return lines


def _peak(row: Row) -> str:
    """The uncapped peak, and whether the gradients are wrong where the outcome does not tell."""
    peak = "n/a" if row.peak_bytes is None else f"{row.peak_bytes / MIB:.2f}"
    return peak if row.extra["right"] or row.extra["refusal"] is None else f"{peak}, wrong gradients"
