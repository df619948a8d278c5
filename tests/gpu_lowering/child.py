"""One model, lowered for an H200 that is not there; the process answers with JSON, a line for each case.

    python -m tests.gpu_lowering.child '{"do": "compile", "model": "mlp", "cases": [{"options": {"budget": "min"}}]}'

`compile`: every kernel goes through Triton and ptxas to machine code for the GPU's architecture. `interpret`: a step
runs whose forward and backward are the generated kernels, in Triton's interpreter; its loss and gradients are compared
with eager's. A case has `options` (remat's), `dtype` ("float32" or "bfloat16"), and `edit`: [old, new] changes the
generated text first, for a comparison that cannot fail proves nothing.
"""

# ruff: noqa: E402  the interpreter must be there before anything imports triton
import json
import os
import sys
import tempfile
import warnings
from typing import Any

TASK: dict[str, Any] = json.loads(sys.argv[1]) if __name__ == "__main__" else {}

if TASK.get("do") == "interpret":
    from tests.gpu_lowering import interpreter
else:
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # compile for real

import copy
import dataclasses

import torch
from torch import Tensor, fx, nn

from bench.gradients import gradients
from bench.models import Workload, build
from remat import exact, torch_internals, torch_internals_gpu
from remat.dryrun import lower_both
from remat.elsewhere import partition_for, pretend
from remat.joint import JointGraph
from remat.passes.retarget import retarget
from remat.settings import resolve
from remat.torch_internals_lowering import Lowered
from tests.graphs import joint_of

TARGET = "H200"
# The real structure, as small as it gets: the interpreter takes about a millisecond for each block of a kernel.
TINY: dict[str, dict[str, Any]] = {
    "mlp": {"layers": 3, "width": 32, "batch": 16},
    "gpt2": {"layers": 2, "width": 32, "heads": 2, "sequence": 16, "batch": 2, "vocabulary": 64},
    "bert": {"layers": 1, "width": 32, "heads": 2, "sequence": 16, "batch": 2, "vocabulary": 64, "dropout": 0.1},
    "resnet": {"width": 8, "pixels": 64, "batch": 4, "block": "basic"},
    "unet": {"levels": 2, "width": 8, "pixels": 8, "batch": 2},
}


class OnGpu(torch_internals.CustomPartitionerFn):
    """Moves the joint graph to the GPU, plans and lowers it there."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
        static = tuple(keywords.get("static_lifetime_input_indices") or ())
        joint = retarget(JointGraph(gm, keywords["num_fwd_outputs"], static), torch.device("cuda:0"))
        settings, _ = resolve(self.options)
        planned, partition, _ = partition_for(joint, settings)
        with exact.schedule(settings):
            LOWERED.extend(lower_both(partition, planned))
        return partition.forward, partition.backward

    def uuid(self) -> Any:
        return None


# Forward and backward of the compilation at hand: Inductor copies the partitioner, which cannot keep them.
LOWERED: list[Lowered] = []


def compiled(workload: Workload, options: dict[str, Any], edit: list[str] | None) -> Any:
    """The model as a function whose steps run what was generated for the GPU."""

    def inner(module: fx.GraphModule, example_inputs: Any, **keywords: Any) -> Any:
        lowered = LOWERED[1 if keywords.get("is_backward") else 0]
        if edit is not None:
            lowered = dataclasses.replace(lowered, source=lowered.source.replace(*edit))
        call = interpreter.load(lowered)

        def run(arguments: list[Any]) -> Any:
            return call(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        patches = {"custom_partitioner_fn": OnGpu(options)}
        with torch_internals.without_compile_caches():
            return torch_internals.compile_with_inductor(gm, example_inputs, patches, lambda _: inner)

    return torch.compile(workload.model, backend=backend, fullgraph=True)


def interpret(case: dict[str, Any]) -> dict[str, Any]:
    """Errors of the interpreted step, relative: of the loss, and the worst of a gradient, beside eager's own."""
    torch.compiler.reset()
    LOWERED.clear()
    workload = _workload(case)
    reference = _same_draws if workload.has_dropout else (lambda model: model)
    state = copy.deepcopy(workload.model.state_dict())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss, mine = _step(compiled(workload, case.get("options") or {}, case.get("edit")), workload)
        workload.model.load_state_dict(state)
        true_loss, eager = _step(reference(workload.model), workload)
        workload.model.load_state_dict(state)
        double = copy.deepcopy(workload.model).double()
        args = tuple(a.double() if a.is_floating_point() else a for a in workload.args)
        exact = dataclasses.replace(workload, model=double, args=args)
        _, gradient = _step(reference(exact.model), exact)
    return {
        "loss": abs(loss - true_loss) / abs(true_loss),
        "against_eager": _error(mine, eager),
        "against_float64": _error(mine, gradient),
        "eager_against_float64": _error(eager, gradient),
        "draws": sum(x.source.count("tl.rand(") for x in LOWERED),
    }


def _step(call: Any, workload: Workload) -> tuple[float, list[Tensor]]:
    torch.manual_seed(1)
    losses: list[float] = []

    def watched(*args: Any) -> Tensor:
        loss: Tensor = call(*args)
        losses.append(float(loss.detach()))
        return loss

    found = gradients(watched, workload.args, list(workload.model.parameters()))
    return losses[0], found


def _same_draws(model: nn.Module) -> Any:
    """The joint graph op by op, random numbers drawn from the same seeds as Triton's kernels draw them."""
    from remat import eager
    from tests.gpu_lowering import draws

    eager.SEED_TRUE[torch.ops.prims.inductor_seeds.default] = draws.seeds
    eager.SEED_TRUE[torch.ops.prims.inductor_random.default] = draws.random
    torch.compiler.reset()
    return torch.compile(model, backend="remat", options={"inner": "eager", "strict": True})


def _error(found: list[Tensor], true: list[Tensor]) -> float:
    """The largest error of a gradient, in norms; a gradient that is zero in exact arithmetic counts by the largest."""
    largest = max(float(gradient.double().norm()) for gradient in true)
    worst = 0.0
    for mine, theirs in zip(found, true, strict=True):
        size = float(theirs.double().norm())
        difference = float((mine.double() - theirs.double()).norm())
        worst = max(worst, difference / (size if size > 1e-6 * largest else largest))
    return worst


def compile_kernels(case: dict[str, Any]) -> dict[str, Any]:
    """Every kernel of the step as machine code."""
    settings, _ = resolve(case.get("options") or {})
    workload = _workload(case)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        joint = joint_of(workload.model, *workload.args)
    planned, partition, _ = partition_for(retarget(joint, torch.device("cuda:0")), settings)
    with exact.schedule(settings):
        both = lower_both(partition, planned)
    found = [
        dataclasses.asdict(kernel)
        for lowered in both
        for kernel in torch_internals_gpu.compile_kernels(lowered.source)
    ]
    return {"kernels": found}


def _workload(case: dict[str, Any]) -> Workload:
    torch.manual_seed(0)
    workload = build(TASK["model"], **TINY[TASK["model"]])
    dtype = getattr(torch, case.get("dtype", "float32"))
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in workload.args)
    return dataclasses.replace(workload, model=workload.model.to(dtype), args=args)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if TASK["do"] == "interpret":
        interpreter.close_gaps()
    pretend(TARGET)
    for case in TASK["cases"]:
        answer = {"compile": compile_kernels, "interpret": interpret}[TASK["do"]](case)
        print("ANSWER", json.dumps(answer), flush=True)
