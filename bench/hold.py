"""Budgets under Inductor: whether they hold, what they cost beside each peer, and how long compiling takes.

    python -m bench.hold
    python -m bench.hold --parts fraction --models gpt2:layers=2

fraction: remat at each fraction of the peak of PyTorch's default plan; predicted, exact (a dry run) and measured peak.
peer: each peer's measured peak (eager mode, torch.utils.checkpoint on each block, Inductor at PyTorch's budgets), then
remat asked for exactly those bytes, and both timed in pairs. compile: the first forward and backward in a new process,
with an empty compile cache and again with what that left.

Each row in a process of its own, written as it comes; rows measured with the same sources are not measured again.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config

from bench import hold_tables, memory, results
from bench.gradients import gradient_error, gradients, reference_gradients
from bench.hold_tables import COMPILE, COMPILED, FRACTION, FRACTIONS, PEER, PEERS
from bench.models import BUILDERS, Workload, build, parse_spec
from bench.timing import paired_ratio, training_step, use_one_thread
from bench.variants import (
    LossFunction,
    Variant,
    disable_compile_caches,
    parse_variant,
    plan_extra,
    plan_fields,
    remat_variant,
    summaries_since,
)
from remat.errors import BudgetUnreachable

# The models of the acceptance: small enough that Inductor compiles each in half a minute.
MODELS = "mlp:layers=40,gpt2:layers=2,llama:layers=2,bert:layers=2,resnet"
PARTS = {FRACTION: FRACTIONS, PEER: PEERS, COMPILE: COMPILED}
SOURCES = (
    *(f"bench/{name}.py" for name in ("models", "custom_models", "memory", "timing", "gradients", "variants", "hold")),
    "remat/*.py",
    "passes/*.py",
)


def main() -> int:
    arguments = _parse_arguments()
    use_one_thread()
    if arguments.row:
        part, _, variant = arguments.row.partition(":")
        inductor_config.compile_threads = 1
        results.write_row(arguments.json, MEASURES[part](arguments.models[0], variant, arguments))
        return 0
    cells = [(m, part, v) for m in arguments.models for part in arguments.parts for v in PARTS[part]]
    failed = [cell for cell in cells if not _ensure(arguments, *cell)]
    rows = results.read_rows(arguments.json)
    for table in hold_tables.TABLES.values():
        print("\n".join(" | ".join(line) for line in table(rows)), end="\n\n")
    return 1 if failed else 0


def _ensure(arguments: argparse.Namespace, model: str, part: str, variant: str) -> bool:
    """Measure a row in a fresh process, unless the file has a current one."""
    for row in hold_tables.of_part(results.read_rows(arguments.json), part):
        if (row.model, row.variant) == (model, variant) and _is_current(row, arguments):
            return True
    print(f"measuring {model} {part} {variant}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "bench.hold", "--row", f"{part}:{variant}", "--models", model]
    for flag in ("pairs", "device", "json"):
        command += [f"--{flag}", str(getattr(arguments, flag))]
    if part != COMPILE:
        return subprocess.run(command).returncode == 0
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "REMAT_CACHE_DIR": folder}
        return all(subprocess.run(command, env=environment).returncode == 0 for _ in range(2))


def _is_current(row: results.Row, arguments: argparse.Namespace) -> bool:
    same_place = (row.torch, row.device) == (torch.__version__, results.device_name(arguments.device))
    pairs = row.extra.get("pairs", arguments.pairs)
    done = row.extra["part"] != COMPILE or "warm_seconds" in row.extra
    return same_place and done and row.extra["sources"] == results.source_hash(SOURCES) and pairs >= arguments.pairs


# --- one row -------------------------------------------------------------------------------------------------------


def measure_fraction(model: str, variant: str, arguments: argparse.Namespace) -> results.Row:
    """remat at a fraction of PyTorch's default peak."""
    disable_compile_caches()
    memory.install(arguments.device)
    workload = _built(model, arguments)
    found = _ours(workload, parse_variant(variant, "inductor"), arguments)
    return _row(model, FRACTION, variant, arguments, **found, note=workload.note)


def measure_peer(model: str, variant: str, arguments: argparse.Namespace) -> results.Row:
    """A peer's peak; remat asked for it; both in pairs."""
    disable_compile_caches()
    memory.install(arguments.device)
    theirs = _built(model, arguments)
    peer = parse_variant(variant, "inductor")
    peer_call, parameters = peer.compile(theirs.model), list(theirs.model.parameters())
    training_step(peer_call, theirs.args, parameters)
    budget = memory.step_memory(lambda: peer_call(*theirs.args), parameters, arguments.device).peak_bytes
    extra = {"note": theirs.note, "peer_error": _gradient_error(peer_call, theirs)}
    workload = _built(model, arguments)
    ours = remat_variant("inductor", str(budget))
    found = _ours(workload, ours, arguments) | {"budget_bytes": budget}
    call = found.pop("call", None)
    if call is not None:
        ratio = paired_ratio(
            lambda: training_step(call, workload.args, workload.model.parameters()),
            lambda: training_step(peer_call, theirs.args, parameters),
            arguments.pairs,
            arguments.device,
        )
        found |= {"step_ratio": ratio.median, "step_ratio_ci": (ratio.low, ratio.high)}
        extra["pairs"] = ratio.pairs
    return _row(model, PEER, variant, arguments, **found, **extra)


def measure_compile(model: str, variant: str, arguments: argparse.Namespace) -> results.Row:
    """Seconds until the first step is done: with an empty cache, or, if this row was just measured so, with a full one.

    Whether the cache is empty is seen by the row that the run before left in the cache's folder.
    """
    workload = _built(model, arguments)
    call = parse_variant(variant, "inductor").compile(workload.model)
    started = time.perf_counter()
    training_step(call, workload.args, workload.model.parameters())
    seconds = time.perf_counter() - started
    note = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "cold-seconds"
    if note.exists():
        return _row(
            model, COMPILE, variant, arguments, compile_seconds=float(note.read_text()), warm_seconds=seconds
        )
    note.write_text(str(seconds))
    return _row(model, COMPILE, variant, arguments, compile_seconds=seconds)


def _ours(workload: Workload, variant: Variant, arguments: argparse.Namespace) -> dict[str, Any]:
    """What remat comes to under a budget; where no plan keeps it, only what it said."""
    call, parameters = variant.compile(workload.model), list(workload.model.parameters())
    started = time.perf_counter()
    try:
        training_step(call, workload.args, parameters)
    except Exception as error:
        if not any(isinstance(cause, BudgetUnreachable) for cause in _causes(error)):
            raise
        return {"unreachable": str(error).partition("\n")[0]}
    seconds = time.perf_counter() - started
    summaries = summaries_since(0)
    peak = memory.step_memory(lambda: call(*workload.args), parameters, arguments.device)
    return {
        **plan_fields(summaries),
        "budget_bytes": max(summary.budget_bytes for summary in summaries),
        "peak_bytes": peak.peak_bytes,
        "saved_bytes": peak.saved_bytes,
        "compile_seconds": seconds,
        "gradient_error": _gradient_error(call, workload),
        "exact_peak_bytes": max(summary.exact_peak_bytes for summary in summaries),
        "call": call,
        **plan_extra(summaries),
    }


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from: torch wraps what a backend raises."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = getattr(seen, "inner_exception", None) or seen.__cause__


def _gradient_error(call: LossFunction, workload: Workload) -> float | None:
    if workload.has_dropout:
        return None
    actual = gradients(call, workload.args, list(workload.model.parameters()))
    return gradient_error(actual, reference_gradients(workload.model, workload.args))


def _built(model: str, arguments: argparse.Namespace) -> Workload:
    name, overrides = parse_spec(model)
    return build(name, device=arguments.device, **overrides)


def _row(model: str, part: str, variant: str, arguments: argparse.Namespace, **found: Any) -> results.Row:
    """What is not a field of a row is kept in `extra`; rows of two parts have to be told apart by their options."""
    found.pop("call", None)
    fields = {name: found.pop(name) for name in list(found) if name in results.Row.__dataclass_fields__}
    extra = found | {"part": part, "inner": "inductor", "sources": results.source_hash(SOURCES)}
    provenance = results.provenance("bench.hold", arguments.device)
    return results.Row(model, variant, {"part": part}, **provenance, **fields, extra=extra)


MEASURES: dict[str, Callable[[str, str, argparse.Namespace], results.Row]] = {
    FRACTION: measure_fraction,
    PEER: measure_peer,
    COMPILE: measure_compile,
}


def _parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hold", description=__doc__.split("\n", 1)[0])
    known = f"model[:key=value...], comma-separated; models: {', '.join(BUILDERS)}"
    parser.add_argument("--models", type=results.listed, default=results.listed(MODELS), help=known)
    parser.add_argument("--parts", type=results.listed, default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--pairs", type=int, default=30, help="timed pairs of steps of remat and the peer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=results.RESULTS / "hold.json")
    parser.add_argument("--row", help="measure this one row (part:variant) of the first model, in this process")
    arguments = parser.parse_args(given)
    try:
        for spec in arguments.models:
            parse_spec(spec)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
