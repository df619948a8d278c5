"""What Inductor generates for a GPU from remat's plans, from PyTorch's, and from random ones: kernels, traffic, memory.

    python -m bench.kernels --models gpt2:layers=2 --target H200
    python -m bench.kernels --random 50

No GPU is needed: each model is traced on the CPU, and lowered in a process that pretends to have the target. Weights
and inputs are bfloat16 unless the model's name ends in `@float32`; attention is what that GPU would run. Rows that were
made with the same sources are not made again.
"""

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench import results
from bench.models import build, parse_spec
from bench.results import MIB, Row
from bench.timing import use_one_thread
from remat import devices
from remat.capture import joint_graph
from remat.elsewhere import Answer, dry_runs
from remat.settings import Settings, resolve

# Depth repeats: these have every kind of kernel that a deeper model has.
MODELS = ("mlp:layers=6", "gpt2:layers=2", "llama:layers=2", "bert:layers=2", "vit:layers=2", "resnet", "unet:levels=2")
PEER = "inductor"
OPTIONS: dict[str, dict[str, Any]] = {
    PEER: {"partitioner": "torch"},
    "inductor-0.5": {"partitioner": "torch", "budget": 0.5},
    "remat": {"strict": True},
    "remat-min": {"strict": True, "budget": "min"},
}
RANDOM = "random"
SOURCES = ("remat/*.py", "passes/*.py", "bench/kernels.py", "bench/models.py", "bench/chargpt.py")
# Below this mean share of Inductor's traffic the default plan needs no further proof that nothing better exists.
CLEARLY_LESS = 0.95


def main() -> int:
    arguments = _parse_arguments()
    use_one_thread()
    if arguments.row:
        for row in measure(arguments.models[0], arguments.row, arguments.target, arguments.random):
            results.write_row(arguments.json, row)
        return 0
    jobs = [(model, part) for model in arguments.models for part in _parts(arguments)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        done = list(pool.map(lambda job: _ensure(arguments, *job), jobs))
    rows = results.read_rows(arguments.json)
    print("\n".join("  ".join(line) for line in cells(rows)))
    print("\n".join(violations(rows)))
    return 0 if all(done) else 1


def _parts(arguments: argparse.Namespace) -> list[str]:
    return ["plans", RANDOM] if arguments.random else ["plans"]


def _ensure(arguments: argparse.Namespace, model: str, part: str) -> bool:
    """Make the rows of one part of one model in a fresh process, unless the file has current ones."""
    wanted = [RANDOM] if part == RANDOM else list(OPTIONS)
    known = {row.variant: row for row in results.read_rows(arguments.json) if row.model == model}
    asked = {"sources": results.source_hash(SOURCES), "target": arguments.target}
    asked |= {"count": arguments.random} if part == RANDOM else {}
    if all(name in known and asked.items() <= known[name].extra.items() for name in wanted):
        return True
    print(f"lowering {model} {part}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "bench.kernels", "--row", part, "--models", model, "--json", str(arguments.json)]
    command += ["--target", arguments.target, "--random", str(arguments.random)]
    return subprocess.run(command).returncode == 0


def measure(model: str, part: str, target: str, count: int) -> Iterator[Row]:
    """The rows of one model: each of `OPTIONS`, or one that sums up so many random plans."""
    name, overrides = parse_spec(model.removesuffix("@float32"))
    torch.manual_seed(0)
    workload = build(name, **overrides)
    args = workload.args
    if not model.endswith("@float32"):
        workload.model.bfloat16()
        args = tuple(a.bfloat16() if a.is_floating_point() else a for a in args)
    joint = joint_graph(workload.model, *args)
    fields = results.provenance("bench.kernels", "cpu") | {"device": f"{target}, not there: a dry run"}
    common = {"note": workload.note, "target": target, "sources": results.source_hash(SOURCES)}
    if part == RANDOM:
        answers = dry_runs(joint, target, [Settings(plan_seed=seed, strict=True) for seed in range(count)])
        figures = [_figures(answer, target) for answer in answers]
        listed = {key: [figure[key] for figure in figures] for key in figures[0]}
        listed |= {"peak_bytes": [answer.dry_run.peak_bytes for answer in answers]}
        yield Row(model, RANDOM, {"plans": count}, **fields, extra=common | listed | {"count": count})
        return
    plans = [resolve(options, {})[0] for options in OPTIONS.values()]
    for (variant, options), answer in zip(OPTIONS.items(), dry_runs(joint, target, plans), strict=True):
        yield Row(
            model,
            variant,
            options,
            **fields,
            predicted_peak_bytes=answer.summary.predicted_peak_bytes if answer.summary else None,
            peak_bytes=answer.dry_run.peak_bytes,
            saved_bytes=answer.dry_run.saved_bytes,
            extra=common | _figures(answer, target),
        )


def _figures(answer: Answer, target: str) -> dict[str, Any]:
    dry = answer.dry_run
    return {
        "kernels": dry.kernel_count,
        "launches": dry.kernel_launches,
        "extern_calls": len(dry.extern_launches),
        "traffic_bytes": dry.traffic_bytes,
        "extern_flops": dry.extern_flops,
        "step_seconds": dry.step_seconds(devices.named(target)),
        "lowering_seconds": dry.lowering_seconds,
        "run_seconds": dry.run_seconds,
    }


# --- what they come to -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Compared:
    """A row beside the peer's of the same model."""

    row: Row
    peer: Row

    def ratio(self, name: str) -> float:
        """This row's figure over the peer's."""
        return float(self._figure(self.row, name)) / self._figure(self.peer, name)

    @staticmethod
    def _figure(row: Row, name: str) -> Any:
        return row.peak_bytes if name == "peak_bytes" else row.extra[name]


def compared(rows: Sequence[Row], variant: str) -> list[Compared]:
    """Every model's row of a variant with its peer."""
    peers = {row.model: row for row in rows if row.variant == PEER}
    return [Compared(row, peers[row.model]) for row in rows if row.variant == variant and row.model in peers]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each plan of each model, and each variant's means over the models, relative to Inductor's."""
    heading = ["model", "variant", "kernels", "launches", "extern calls", "traffic, MB", "extern GFLOP"]
    lines = [[*heading, "roofline step, us", "exact peak, MiB", "traffic", "step", "peak"]]
    for model in dict.fromkeys(row.model for row in rows):
        for variant in OPTIONS:
            lines += [_line(found) for found in compared(rows, variant) if found.row.model == model]
    for variant in OPTIONS:
        found = compared(rows, variant)
        if variant != PEER and found:
            means = [f"{_mean([one.ratio(name) for one in found]):.3f}" for name in RATIOS]
            lines.append(["mean", variant, *[""] * (len(lines[0]) - 2 - len(RATIOS)), *means])
    return lines


RATIOS = ("traffic_bytes", "step_seconds", "peak_bytes")


def _line(found: Compared) -> list[str]:
    row, extra = found.row, found.row.extra
    assert row.peak_bytes is not None
    figures = [f"{extra['traffic_bytes'] / 1e6:.1f}", f"{extra['extern_flops'] / 1e9:.2f}"]
    figures += [f"{extra['step_seconds'] * 1e6:.1f}", f"{row.peak_bytes / MIB:.2f}"]
    counts = [str(extra[name]) for name in ("kernels", "launches", "extern_calls")]
    return [row.model, row.variant, *counts, *figures, *(f"{found.ratio(name):.3f}" for name in RATIOS)]


def random_cells(rows: Sequence[Row]) -> list[list[str]]:
    """How many random plans of each model are better than Inductor's default, and in what."""
    heading = ["model", "random plans", "least traffic", "least step", "least peak"]
    lines = [[*heading, "no worse in traffic, launches and peak", "best traffic of those"]]
    for found in compared(rows, RANDOM):
        extra, peer = found.row.extra, found.peer
        traffic = [value / peer.extra["traffic_bytes"] for value in extra["traffic_bytes"]]
        steps = [value / peer.extra["step_seconds"] for value in extra["step_seconds"]]
        peaks = [value / (peer.peak_bytes or 1) for value in extra["peak_bytes"]]
        launches = [value / peer.extra["launches"] for value in extra["launches"]]
        within = [t for t, n, p in zip(traffic, launches, peaks, strict=True) if max(t, n, p) <= 1]
        least = [f"{min(values):.3f}" for values in (traffic, steps, peaks)]
        best = f"{min(within):.3f}" if within else "n/a"
        lines.append([found.row.model, str(len(traffic)), *least, str(len(within)), best])
    return lines


def violations(rows: Sequence[Row]) -> Iterator[str]:
    """Where the default plan does more than Inductor's."""
    found = compared(rows, "remat")
    for one in found:
        for name in ("traffic_bytes", "launches", "peak_bytes"):
            if one.ratio(name) > 1:
                yield f"{one.row.model}: {name} is {one.ratio(name):.4f} of Inductor's"
    mean = _mean([one.ratio("traffic_bytes") for one in found]) if found else 0.0
    missing = {one.row.model for one in found} - {one.row.model for one in compared(rows, RANDOM)}
    if mean > CLEARLY_LESS and missing:
        yield f"mean traffic is {mean:.3f} of Inductor's: run --random 50 for {', '.join(sorted(missing))}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", type=results.listed, default=list(MODELS), help="comma-separated")
    parser.add_argument("--target", default="H200", help="a GPU's name")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="try N random plans of each model too")
    parser.add_argument("--jobs", type=int, default=1, help="models lowered at a time")
    parser.add_argument("--json", type=Path, default=results.RESULTS / "kernels.json")
    parser.add_argument("--row", choices=["plans", RANDOM], help="make these rows of the model named, in this process")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
