"""The main job: train a small GPT on real text, eagerly and with `torch.compile(model, backend="remat")`.

    python -m bench.train [--budget 0.5] [--steps 160] [--dropout 0]

Both runs start from the same weights and see the same batches. Prints a table, writes one JSON row per run
and a picture, and exits with status 1 if remat changed the training:

* without dropout, the two loss curves have to agree;
* with dropout, eager and compiled draw from different random streams by nature. There, remat's step is
  compared with the same joint graph run whole, from the same seeds (its option `check`).
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import memory, results
from bench.corpus import Corpus, load_corpus
from bench.gradients import gradient_error, gradients, reference_gradients
from bench.plots import draw_training
from bench.results import LAST_STEPS, MIB, final_loss
from bench.timing import Ratio, paired_ratio, training_step, use_one_thread
from bench.trainer import Run, Setup, build_model, sample_batch, train
from bench.variants import Variant, disable_compile_caches, plan_extra, plan_fields, remat_variant
from remat.errors import CheckFailed

CORPUS_BYTES = 3_000_000
# Without dropout, rounding alone separates the curves: by 2e-7 of the loss over the default steps. One
# weight's gradient halved moves them by 4e-4, 1% of noise in it by 6e-5.
CURVE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Verdict:
    """Whether remat's training is the eager one, and in words how that was checked."""

    passed: bool
    text: str


def main() -> int:
    arguments = _parse_arguments()
    console = Console()
    use_one_thread()
    disable_compile_caches()
    memory.install(arguments.device)
    setup = Setup(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Setup)})
    corpus = load_corpus(CORPUS_BYTES)
    variants = (Variant("eager"), remat_variant(arguments.inner, arguments.budget))
    eager, ours = _train_all(variants, setup, corpus, console)
    with console.status("timing pairs of steps, checking gradients"):
        ratio = _step_ratio(ours, eager, setup, corpus, arguments.pairs)
        verdict = _verdict(eager, ours, setup, corpus, arguments.check_inner)
        rows = [_row(run, setup, corpus, ratio, verdict) for run in (eager, ours)]
    results.write_rows(arguments.json, rows)
    title = f"CharGPT, {setup.layers} layers, dropout {setup.dropout}: budget {arguments.budget or 'none'}"
    draw_training(arguments.out, (eager, ours), title)
    console.print(_table(eager, ours, ratio, verdict, title))
    console.print(f"rows: {arguments.json}   picture: {arguments.out}", soft_wrap=True)
    return 0 if verdict.passed else 1


def _train_all(variants: Sequence[Variant], setup: Setup, corpus: Corpus, console: Console) -> list[Run]:
    """Train each variant in turn under a progress bar."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        for variant in variants:
            note = "compiling" if variant.backend else ""
            task = progress.add_task(f"{variant.name:6}", total=setup.steps, note=note)

            def report(step: int, loss: float, task: Any = task) -> None:
                progress.update(task, completed=step, note=f"loss {loss:.3f}")

            runs.append(train(variant, setup, corpus, report))
    return runs


def _step_ratio(ours: Run, eager: Run, setup: Setup, corpus: Corpus, pairs: int) -> Ratio:
    """Seconds of one forward and backward, remat over eager."""
    batch = sample_batch(setup, corpus)

    def step(run: Run) -> Callable[[], None]:
        return lambda: training_step(run.model, batch, run.module.parameters())

    return paired_ratio(step(ours), step(eager), pairs, setup.device)


def _verdict(eager: Run, ours: Run, setup: Setup, corpus: Corpus, check_inner: str) -> Verdict:
    """See the module's docstring for the two ways."""
    if setup.dropout == 0:
        distance = curve_distance(eager, ours)
        text = f"loss curves differ by {distance:.1e} of the loss (allowed: {CURVE_TOLERANCE:.0e})"
        return Verdict(distance <= CURVE_TOLERANCE, text)
    module = build_model(setup, len(corpus.vocabulary))
    options = ours.variant.options | {"check": True, "inner": check_inner}
    checked = Variant("check", "remat", options).compile(module)
    try:
        training_step(checked, sample_batch(setup, corpus), module.parameters())
    except CheckFailed as error:
        return Verdict(False, f"differs from the joint graph: {error}")
    return Verdict(True, f"same outputs and gradients as the joint graph, dropout included ({check_inner})")


def curve_distance(first: Run, second: Run) -> float:
    """The largest relative difference between two runs' losses at any step, training or validation."""
    curves = [
        np.array([*run.training, *(loss for _, loss in run.validation)], dtype=np.float64)
        for run in (first, second)
    ]
    return float(np.max(np.abs(curves[0] - curves[1]) / np.abs(curves[0])))


def _row(run: Run, setup: Setup, corpus: Corpus, ratio: Ratio, verdict: Verdict) -> results.Row:
    extra = {
        "training": dataclasses.asdict(setup),
        "training_loss": run.training,
        "validation_loss": run.validation,
        **plan_extra(run.summaries),
    }
    if run.variant.is_remat:
        extra |= {"peer": "eager", "pairs": ratio.pairs, "passed": verdict.passed, "check": verdict.text}
    return results.Row(
        model="chargpt",
        variant=run.variant.name,
        options=run.variant.options,
        **results.provenance("bench.train", setup.device),
        **plan_fields(run.summaries),
        peak_bytes=run.memory.peak_bytes,
        saved_bytes=run.memory.saved_bytes,
        step_ratio=ratio.median if run.variant.is_remat else None,
        step_ratio_ci=(ratio.low, ratio.high) if run.variant.is_remat else None,
        compile_seconds=run.compile_seconds if run.variant.backend else None,
        gradient_error=_gradient_error(run, setup, corpus),
        extra=extra,
    )


def _gradient_error(run: Run, setup: Setup, corpus: Corpus) -> float | None:
    """Against float64, at the trained weights; None with dropout, where the two draw different masks."""
    if setup.dropout:
        return None
    batch = sample_batch(setup, corpus)
    actual = gradients(run.model, batch, list(run.module.parameters()))
    return gradient_error(actual, reference_gradients(run.module, batch))


def _table(eager: Run, ours: Run, ratio: Ratio, verdict: Verdict, title: str) -> Table:
    table = Table(title=title, caption=("passed: " if verdict.passed else "FAILED: ") + verdict.text)
    table.add_column("")
    for heading in ("eager", "remat", "remat / eager"):
        table.add_column(heading, justify="right")

    def compare(label: str, quantity: Callable[[Run], float], digits: int) -> None:
        before, after = quantity(eager), quantity(ours)
        table.add_row(label, f"{before:.{digits}f}", f"{after:.{digits}f}", f"{after / before:.3f}")

    compare(f"training loss, last {LAST_STEPS} steps", lambda run: final_loss(run.training), 3)
    compare("validation loss", lambda run: run.validation[-1][1], 3)
    compare("saved for the backward, MiB", lambda run: run.memory.saved_bytes / MIB, 2)
    compare("measured peak, MiB", lambda run: run.memory.peak_bytes / MIB, 2)
    predicted = plan_fields(ours.summaries)["predicted_peak_bytes"]
    table.add_row("peak predicted by the plan, MiB", "", f"{predicted / MIB:.2f}", "")
    interval = f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    table.add_row(f"step time, {ratio.pairs} pairs", "1", "", interval)
    table.add_row("compile, s", "", f"{ours.compile_seconds:.1f}", "")
    decision = sum(summary.decision_seconds for summary in ours.summaries)
    table.add_row("of it remat's decision, s", "", f"{decision:.2f}", "")
    table.add_row("recomputed operations", "", str(plan_extra(ours.summaries)["recomputed_ops"]), "")
    return table


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.train", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--budget", help="remat's option: a fraction, min or bytes; default: the fastest plan"
    )
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--check-inner", choices=("inductor", "eager"), default="eager")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--batch", type=int, default=16, help="windows of text in a micro-batch")
    parser.add_argument("--context", type=int, default=128, help="characters in a window")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--attention", choices=("sdpa", "math"), default="sdpa")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=30, help="steps until the full learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=30, help="timed pairs of steps")
    parser.add_argument("--json", type=Path, default=results.RESULTS / "train.json")
    parser.add_argument("--out", type=Path, default=results.RESULTS / "train.png", help="the picture")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
