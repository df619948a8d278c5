"""Dry runs for a GPU that is not here, in a process of their own that pretends to have it.

The joint graph is traced on the CPU, sent over, retargeted, planned with that GPU's figures, lowered to Triton, and its
host code run. Nothing that pretending changes (torch's device interface, Triton's driver) reaches this process.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from remat import devices, exact, torch_internals, torch_internals_gpu, torch_internals_lowering
from remat.capture import joint_graph
from remat.dryrun import DryRun, dry_run_partition
from remat.errors import DryRunFailed, SettingError
from remat.joint import JointGraph
from remat.partitioner import decide, torchs_halves
from remat.passes.partition import Partition
from remat.passes.retarget import retarget
from remat.report import PlanSummary
from remat.settings import Settings, resolve


@dataclass(frozen=True)
class Answer:
    """One plan for a device: what it would take there, and the plan's summary (None for PyTorch's own partition)."""

    dry_run: DryRun
    summary: PlanSummary | None


@dataclass(frozen=True)
class Request:
    """What the other process is asked: a packed joint graph, the GPU's name, and the plans to try.

    plans: settings of each; under `partitioner=torch` PyTorch's own partition, at its budget. patches: Inductor's
    settings to lower under.
    """

    graph: bytes
    num_fwd_outputs: int
    static_indices: tuple[int, ...]
    target: str
    plans: tuple[Settings, ...]
    patches: Mapping[str, Any]


def dry_run(
    fn: Callable[..., Any], *args: Any, target: str | None = None, options: Mapping[str, Any] | None = None
) -> Answer:
    """What a training step of `fn(*args)` would take under remat and Inductor; no kernel is built, and nothing runs.

    Forgets what torch.compile has compiled in this process (`torch.compiler.reset`): call it before training.

    target: a GPU's name (`H200`, `H100`, `A100`, `L4`) that need not be here; None: the device of the arguments.
    options: as `torch.compile(..., options=)` takes them. Raises SettingError, ValueError (an unknown target, or
    nothing that requires a gradient), DryRunFailed, and what the partitioner raises.
    """
    settings, patches = resolve(options, passthrough=torch_internals.inductor_options())
    refused = [name for name in ("cpp_wrapper", "max_autotune") if patches.get(name)]
    if refused:
        raise SettingError(f"{refused[0]} is not allowed in a dry run, which reads a Python wrapper and times nothing")
    if settings.budget == "auto":
        raise SettingError("budget='auto' is not allowed in a dry run: it is what is free where training runs")
    joint = joint_graph(fn, *args)
    if target is not None:
        return dry_runs(joint, target, [settings], patches)[0]
    planned, partition, summary = partition_for(joint, settings)
    with exact.schedule(settings):
        return Answer(dry_run_partition(partition, planned, patches), summary)


def dry_runs(
    joint: JointGraph, target: str, plans: Sequence[Settings], patches: Mapping[str, Any] | None = None
) -> list[Answer]:
    """Plan and dry-run a joint graph traced on the CPU for a GPU (`H200`), once for each settings.

    Raises ValueError for a GPU that is not known, and DryRunFailed with what the other process said.
    """
    devices.named(target)
    if importlib.util.find_spec("triton") is None:
        raise DryRunFailed(f"target={target}: lowering for a GPU needs the package triton (pip install remat[triton])")
    packed = torch_internals_lowering.pack_graph(joint.module)
    request = Request(packed, joint.num_fwd_outputs, joint.static_indices, target, tuple(plans), dict(patches or {}))
    command = [sys.executable, "-m", "remat.elsewhere"]
    # A process that pretends must see no real GPU; and it must find remat where this one did.
    folders = [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, input=pickle.dumps(request), capture_output=True, env=environment)
    if done.returncode:
        raise DryRunFailed(f"target={target}: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    answers: list[Answer] = pickle.loads(done.stdout)
    return answers


def pretend(target: str) -> None:
    """From now on this process has this GPU, as `cuda:0`. Not for a user's process."""
    gpu = devices.named(target)
    assert gpu.processor is not None
    torch_internals_gpu.pretend(f"NVIDIA {gpu.name}", gpu.processor)
    devices.take_cuda_for(gpu)


def pretended(joint: JointGraph, target: str) -> JointGraph:
    """The joint graph as it is on a GPU that this process pretends to have from now on."""
    pretend(target)
    return retarget(joint, torch.device("cuda:0"))


def partition_for(joint: JointGraph, settings: Settings) -> tuple[JointGraph, Partition, PlanSummary | None]:
    """The partition that settings ask for, with the graph that it is of; PyTorch's own under `partitioner=torch`."""
    if settings.partitioner != "torch":
        decision = decide(joint, settings, "dry run")
        return decision.joint, decision.partition, decision.summary
    keywords = {"num_fwd_outputs": joint.num_fwd_outputs, "static_lifetime_input_indices": list(joint.static_indices)}
    inputs = [node.meta["val"] for node in joint.nodes if node.op == "placeholder"]
    forward, backward = torchs_halves(joint, inputs, keywords, settings)
    values = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
    sizes = sum(isinstance(value, torch.SymInt) for value in values)
    return joint, Partition(forward, backward, sizes), None


def _answered(request: Request) -> list[Answer]:
    module = torch_internals_lowering.unpack_graph(request.graph)
    joint = pretended(JointGraph(module, request.num_fwd_outputs, request.static_indices), request.target)
    found = []
    for settings in request.plans:
        planned, partition, summary = partition_for(joint, settings)
        with exact.schedule(settings):
            found.append(Answer(dry_run_partition(partition, planned, request.patches), summary))
    return found


def main() -> None:
    """Answer the request on standard input; what anything prints goes to standard error."""
    warnings.simplefilter("ignore")
    answers_to = os.dup(1)
    os.dup2(2, 1)
    answers = _answered(pickle.load(sys.stdin.buffer))
    with os.fdopen(answers_to, "wb") as stream:
        pickle.dump(answers, stream)


if __name__ == "__main__":
    from remat.elsewhere import main as run  # pickled classes must not be those of __main__

    run()
