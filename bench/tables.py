"""Results as Markdown tables in README.md, between `<!-- table:NAME -->` and `<!-- /table:NAME -->`.

NAME is that of a file `bench/results/NAME.json`, or `NAME@INNER` for its rows run by one executor (`inductor`
or `eager`); rows without an executor, such as eager ones, belong to both. NAME `flags` is the table of settings;
`budget` and `budget-...` are the tables of bench/budget_tables.py over `bench/results/budget.json`, `kernels` and
`kernels-random` those of bench/kernels.py, `costs`, `costs-default` and `costs-half` those of bench/costs_tables.py,
`cap` and `cap-peers` those of bench/cap_tables.py, `hold` and `hold-...` those of bench/hold_tables.py.

    python -m bench.tables --write      put the current results into the README
    python -m bench.tables --check      exit with status 1 if the README shows others
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import budget_tables, cap_tables, costs_tables, graphs, hold_tables, kernels, results
from bench.results import Row
from remat import settings

MARKED = re.compile(r"<!-- table:([\w@-]+) -->\n.*?<!-- /table:\1 -->", re.DOTALL)

Cell = Callable[[Row], str | None]


def _mib(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else f"{size_bytes / results.MIB:.2f}"


def _step_ratio(row: Row) -> str | None:
    if row.step_ratio is None or row.step_ratio_ci is None:
        return None
    low, high = row.step_ratio_ci
    return f"{row.step_ratio:.3f} [{low:.3f}, {high:.3f}]"


def _recomputed(row: Row) -> str | None:
    """Recomputed FLOPs in percent of the forward's."""
    if row.recomputed_flops is None or not row.forward_flops:
        return None
    return f"{100 * row.recomputed_flops / row.forward_flops:.1f}"


def _training_loss(row: Row) -> str | None:
    curve = row.extra.get("training_loss")
    return None if curve is None else f"{results.final_loss(curve):.3f}"


def _validation_loss(row: Row) -> str | None:
    curve = row.extra.get("validation_loss")
    return None if curve is None else f"{curve[-1][1]:.3f}"


COLUMNS: dict[str, Cell] = {
    "model": lambda row: row.model,
    "variant": lambda row: row.variant,
    "run by": lambda row: row.extra.get("inner"),
    "training loss": _training_loss,
    "validation loss": _validation_loss,
    "saved, MiB": lambda row: _mib(row.saved_bytes),
    "peak, MiB": lambda row: _mib(row.peak_bytes),
    "predicted peak, MiB": lambda row: _mib(row.predicted_peak_bytes),
    "recomputed FLOPs, %": _recomputed,
    "step time ratio": _step_ratio,
    "decision, s": lambda row: None if row.decision_seconds is None else f"{row.decision_seconds:.2f}",
    "compile, s": lambda row: None if row.compile_seconds is None else f"{row.compile_seconds:.1f}",
    "gradient error": lambda row: None if row.gradient_error is None else f"{row.gradient_error:.1e}",
}


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """A heading and one line per row; a column appears if any row has a value for it."""
    filled = {name: [cell(row) for row in rows] for name, cell in COLUMNS.items()}
    shown = {name: values for name, values in filled.items() if any(value is not None for value in values)}
    lines = zip(*shown.values(), strict=True)
    return [list(shown), *([value or "n/a" for value in line] for line in lines)]


OWN_CELLS: dict[str, Callable[[Sequence[Row]], list[list[str]]]] = {
    "cap": cap_tables.cells,
    "cap-peers": cap_tables.peer_cells,
    "costs": costs_tables.cells,
    "costs-default": costs_tables.default_cells,
    "costs-half": costs_tables.half_cells,
    "graphs": graphs.cells,
    "kernels": kernels.cells,
    "kernels-random": kernels.random_cells,
    **hold_tables.TABLES,
}


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A heading and lines as one Markdown table; text columns to the left, numbers to the right."""
    heading, *body = lines
    text_columns = ("model", "variant", "run by", "graph", "by")
    rule = ["---" if name in text_columns else "---:" for name in heading]
    return "\n".join("| " + " | ".join(line) + " |" for line in [heading, rule, *body])


def ran_on(rows: Sequence[Row]) -> str:
    """What the rows ran on, and the script that made them."""
    places = sorted({f"torch {row.torch}, {row.device}" for row in rows})
    scripts = sorted({" ".join(row.command.split()[:3]) for row in rows})
    revisions = sorted({row.git for row in rows})
    return (
        f"Ran on {'; '.join(places)}, at {', '.join(revisions)}. Made by `{'`, `'.join(scripts)}`; the JSON holds each "
        "row's whole command."
    )


def rendered(document: str, folder: Path = results.RESULTS) -> str:
    """`document` with every marked table replaced by the current one."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name == "flags":
            return f"<!-- table:flags -->\n\n{settings.markdown()}\n\n<!-- /table:flags -->"
        stem, _, inner = name.partition("@")
        if name in budget_tables.TABLES:
            stem = "budget"
        if name in OWN_CELLS:
            stem = name.partition("-")[0]
        rows = results.read_rows(folder / f"{stem}.json")
        selected = [row for row in rows if not inner or row.extra.get("inner") in (None, inner)]
        if not selected:
            raise FileNotFoundError(f"no results for the table {name} in {folder.name}/{stem}.json")
        if name in budget_tables.TABLES:
            shown = budget_tables.markdown(name, rows)
        else:
            shown = markdown(OWN_CELLS.get(name, cells)(selected))
        return f"<!-- table:{name} -->\n\n{shown}\n\n{ran_on(selected)}\n\n<!-- /table:{name} -->"

    return MARKED.sub(table, document)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=__doc__.split("\n", 1)[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    parser.add_argument("file", type=Path, nargs="?", default=results.ROOT / "README.md")
    arguments = parser.parse_args()
    document = arguments.file.read_text()
    current = rendered(document)
    if arguments.write:
        arguments.file.write_text(current)
    elif document != current:
        print(f"{arguments.file.name} does not show the current results: run python -m bench.tables --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
