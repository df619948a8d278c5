"""The picture of a training run: what was learned, and the memory over one step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from bench.memory import StepMemory
from bench.results import MIB
from bench.trainer import Run

Style = dict[str, Any]

# The first line is wide and light, or the second would hide it where they agree.
STYLES: tuple[Style, Style] = (
    {"color": "tab:orange", "linewidth": 3.5, "alpha": 0.6},
    {"color": "tab:blue", "linewidth": 1.2},
)


def draw_training(path: Path, runs: Sequence[Run], title: str) -> None:
    """Loss curves of `runs` beside the memory that one forward and backward of each keeps alive."""
    figure, (losses, memory) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for run, style in zip(runs, STYLES, strict=True):
        _draw_losses(losses, run, style)
        _draw_memory(memory, run.memory, run.variant.name, style)
    losses.set(xlabel="optimizer step", ylabel="loss, nats per character", title="Loss")
    losses.legend()
    memory.set_xticks([0.5, 1.5], ["forward", "backward"])
    memory.axvline(1, color="grey", linewidth=0.8)
    memory.set(ylabel="MiB alive above parameters and inputs", title="Memory over one step", xlim=(0, 2))
    memory.set_ylim(bottom=0)
    memory.legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_losses(axes: Axes, run: Run, style: Style) -> None:
    axes.plot(range(1, len(run.training) + 1), run.training, **style, label=f"{run.variant.name}, training")
    steps, losses = zip(*run.validation, strict=True)
    axes.plot(steps, losses, **style, linestyle="--", marker="o", label=f"{run.variant.name}, validation")


def _draw_memory(axes: Axes, memory: StepMemory, name: str, style: Style) -> None:
    """Alive bytes after each event; both phases are equally wide, as runs differ in their events."""
    forward = np.linspace(0, 1, memory.boundary, endpoint=False)
    backward = np.linspace(1, 2, len(memory.events) - memory.boundary)
    label = f"{name}: peak {memory.peak_bytes / MIB:.1f}, saved {memory.saved_bytes / MIB:.1f} MiB"
    places = np.concatenate([forward, backward])
    axes.step(places, memory.alive_bytes() / MIB, where="post", **style, label=label)
