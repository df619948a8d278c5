"""Models x variants: saved bytes, peak, gradients and step time, each cell in a process of its own.

    python -m bench.compare --models mlp,gpt2:layers=6 --variants eager,inductor,remat,remat-min --inner eager

`inductor` stands for PyTorch's own partitioner. With `--inner inductor` it is torch.compile's default; with
`--inner eager` it is that partitioner's cut, run by the same op-by-op executor as remat's. A budget follows
a dash (`inductor-0.5`, `remat-0.5`, `remat-min`). Rows are written as they come, and rows that were measured
with the same sources are not measured again.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from rich.console import Console
from rich.table import Table

import remat
from bench import memory, results
from bench.gradients import gradient_error, gradients, reference_gradients
from bench.models import BUILDERS, Workload, build, parse_spec
from bench.tables import cells
from bench.timing import Ratio, paired_ratio, training_step, use_one_thread
from bench.variants import (
    LossFunction,
    Variant,
    disable_compile_caches,
    parse_variant,
    plan_extra,
    plan_fields,
    summaries_since,
)

PEER = "inductor"
# What a measurement depends on, besides remat itself.
MEASURING_SOURCES = tuple(
    f"bench/{name}.py" for name in ("models", "chargpt", "memory", "timing", "gradients")
)
REMAT_SOURCES = ("remat/*.py", "passes/*.py")
# Columns of text when the output goes into a file or a pipe.
PLAIN_WIDTH = 180


def main() -> int:
    arguments = _parse_arguments()
    use_one_thread()
    if arguments.row:
        measure_row(arguments)
        return 0
    failed = [cell for cell in _missing_cells(arguments) if not _run_cell(arguments, *cell)]
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(_table(_selected_rows(arguments)))
    for model, variant in failed:
        console.print(f"failed: {model} {variant} (its error is above)")
    return 1 if failed else 0


def measure_row(arguments: argparse.Namespace) -> None:
    """Measure one model under one variant, in this process, and write the row."""
    disable_compile_caches()
    inductor_config.compile_threads = 1
    memory.install(arguments.device)
    model, variant = arguments.models[0], parse_variant(arguments.variants[0], arguments.inner)
    name, overrides = parse_spec(model)
    workload = build(name, device=arguments.device, **overrides)
    parameters = list(workload.model.parameters())
    call = variant.compile(workload.model)
    planned_before = len(remat.summaries())
    start = time.perf_counter()
    training_step(call, workload.args, parameters)
    compile_seconds = time.perf_counter() - start if variant.backend else None
    summaries = summaries_since(planned_before) if variant.is_remat else ()
    step = memory.step_memory(lambda: call(*workload.args), parameters, arguments.device)
    error = _gradient_error(call, workload)
    ratio = _step_ratio(call, workload, arguments) if wants_pairs(variant, arguments.pairs) else None
    row = results.Row(
        model=model,
        variant=variant.name,
        options=variant.options,
        **results.provenance("bench.compare", arguments.device),
        **plan_fields(summaries),
        peak_bytes=step.peak_bytes,
        saved_bytes=step.saved_bytes,
        step_ratio=ratio.median if ratio else None,
        step_ratio_ci=(ratio.low, ratio.high) if ratio else None,
        compile_seconds=compile_seconds,
        gradient_error=error,
        extra=plan_extra(summaries) | _extra(variant, workload, ratio, arguments.inner),
    )
    results.write_row(arguments.json, row)


def wants_pairs(variant: Variant, pairs: int) -> bool:
    """Whether a variant is timed against the peer: remat's own plans are."""
    return pairs > 0 and variant.name.startswith("remat")


def _gradient_error(call: LossFunction, workload: Workload) -> float | None:
    """None with dropout: the float64 run would draw other masks."""
    if workload.has_dropout:
        return None
    actual = gradients(call, workload.args, list(workload.model.parameters()))
    return gradient_error(actual, reference_gradients(workload.model, workload.args))


def _step_ratio(call: LossFunction, workload: Workload, arguments: argparse.Namespace) -> Ratio:
    """Step time over that of a second instance of the model, compiled as the peer."""
    name, overrides = parse_spec(arguments.models[0])
    peer = build(name, device=arguments.device, **overrides)
    peer_call = parse_variant(PEER, arguments.inner).compile(peer.model)
    return paired_ratio(
        lambda: training_step(call, workload.args, workload.model.parameters()),
        lambda: training_step(peer_call, peer.args, peer.model.parameters()),
        arguments.pairs,
        arguments.device,
    )


def _extra(variant: Variant, workload: Workload, ratio: Ratio | None, inner: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"note": workload.note, "sources": row_sources(variant)}
    if variant.backend:
        extra["inner"] = inner
    if ratio:
        extra |= {"peer": PEER, "pairs": ratio.pairs}
    return extra


def row_sources(variant: Variant) -> str:
    """A hash of the sources that a row depends on: an eager row does not age with remat."""
    return results.source_hash(MEASURING_SOURCES + (REMAT_SOURCES if variant.is_remat else ()))


def _missing_cells(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """The cells that the file has no current row for, in the order asked for."""
    current = {row.key: row for row in results.read_rows(arguments.json)}
    missing = []
    for model in arguments.models:
        for name in arguments.variants:
            variant = parse_variant(name, arguments.inner)
            row = current.get(results.row_key(model, name, variant.options))
            pairs = arguments.pairs if wants_pairs(variant, arguments.pairs) else 0
            if (
                row is None
                or row.torch != torch.__version__
                or row.device != results.device_name(arguments.device)
                or row.extra["sources"] != row_sources(variant)
                or row.extra.get("pairs", 0) < pairs
            ):
                missing.append((model, name))
    return missing


def _run_cell(arguments: argparse.Namespace, model: str, variant: str) -> bool:
    """Measure one cell in a fresh process, where nothing compiled or allocated before can disturb it."""
    command = [sys.executable, "-m", "bench.compare", "--row", "--models", model, "--variants", variant]
    for flag in ("inner", "pairs", "device", "json"):
        command += [f"--{flag}", str(getattr(arguments, flag))]
    print(f"measuring {model} {variant}", file=sys.stderr, flush=True)
    return subprocess.run(command).returncode == 0


def _selected_rows(arguments: argparse.Namespace) -> list[results.Row]:
    """The rows of the file that were asked for, in that order."""
    rows = {row.key: row for row in results.read_rows(arguments.json)}
    keys = [
        results.row_key(model, name, parse_variant(name, arguments.inner).options)
        for model in arguments.models
        for name in arguments.variants
    ]
    return [rows[key] for key in keys if key in rows]


def _table(rows: list[results.Row]) -> Table:
    heading, *body = cells(rows)
    table = Table(caption=f"ratios are to {PEER}'s step time; sizes in MiB, times in seconds")
    for column, name in enumerate(heading):
        table.add_column(name, justify="left" if column < 3 else "right")
    for line in body:
        table.add_row(*line)
    return table


def _parse_arguments() -> argparse.Namespace:
    listed = results.listed
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--models",
        type=listed,
        default=listed("mlp,gpt2,llama,bert,vit,resnet"),
        help=f"model[:key=value...], comma-separated; models: {', '.join(BUILDERS)}",
    )
    parser.add_argument("--variants", type=listed, default=listed("eager,inductor,remat,remat-min"))
    parser.add_argument("--inner", choices=("inductor", "eager"), default="eager")
    parser.add_argument("--pairs", type=int, default=0, help="timed pairs of steps of remat and the peer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=results.RESULTS / "compare.json")
    parser.add_argument("--row", action="store_true", help="measure the one cell named, in this process")
    arguments = parser.parse_args()
    try:
        for spec in arguments.models:
            parse_spec(spec)
        for name in arguments.variants:
            parse_variant(name, arguments.inner)
    except ValueError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    sys.exit(main())
