"""What Inductor generates for a GPU from remat's plans: it compiles for sm_90, and computes eager's step.

No GPU is there: kernels are compiled by Triton and ptxas, and run in Triton's interpreter. Each model is a process of
its own, since pretending changes torch for good.
"""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install remat[triton]"),
]
SLOW = ("gpt2", "resnet", "unet")  # one to four minutes each
MODELS = ["mlp", "bert", *(pytest.param(model, marks=pytest.mark.slow) for model in SLOW)]
PLANS: dict[str, dict[str, Any]] = {
    "default": {"strict": True},
    "smallest": {"strict": True, "budget": "min", "exact": False},
}
CASES = {
    "compile": [(plan, "float32") for plan in PLANS],
    "interpret": [(plan, dtype) for plan in PLANS for dtype in ("float32", "bfloat16")],
}
NEAR = 1e-5
SECONDS = 900


def answers(do: str, model: str, edit: tuple[str, str] | None = None) -> list[dict[str, Any]]:
    """What the child says of each case."""
    kept = CASES[do] if edit is None else CASES[do][:1]
    cases = [{"options": PLANS[plan], "dtype": dtype, "edit": edit} for plan, dtype in kept]
    task = json.dumps({"do": do, "model": model, "cases": cases})
    command = [sys.executable, "-m", "tests.gpu_lowering.child", task]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return [json.loads(line.removeprefix("ANSWER ")) for line in lines]


# One test a model, not one a case: a child's answers are not shared between pytest's workers.
@pytest.mark.parametrize("model", MODELS)
def test_every_kernel_compiles_for_the_gpu(model: str) -> None:
    for case, answer in zip(CASES["compile"], answers("compile", model), strict=True):
        kernels = answer["kernels"]
        assert kernels, case
        assert {kernel["target"] for kernel in kernels} == {"sm_90"}, case
        assert all(kernel["is_machine_code"] for kernel in kernels), case


@pytest.mark.parametrize("model", ["mlp", *(pytest.param(model, marks=pytest.mark.slow) for model in ("bert", *SLOW))])
def test_the_interpreted_step_is_eagers(model: str) -> None:
    found = dict(zip(CASES["interpret"], answers("interpret", model), strict=True))
    for (plan, dtype), answer in found.items():
        if dtype == "float32":
            assert answer["loss"] <= NEAR, plan
            assert answer["against_eager"] <= NEAR, plan
        else:
            assert answer["against_float64"] <= 2 * answer["eager_against_float64"], plan
    if model == "bert":
        default, smallest = (found[plan, "float32"]["draws"] for plan in PLANS)
        assert smallest > default > 0, "the smallest plan draws its masks again in the backward"


@pytest.mark.parametrize("edit", [("0.7071067811865476", "0.70"), ("tl.sum(", "2 * tl.sum(")], ids=["constant", "sum"])
def test_an_edited_kernel_is_noticed(edit: tuple[str, str]) -> None:
    (answer,) = answers("interpret", "mlp", edit)
    assert answer["against_eager"] > 100 * NEAR
