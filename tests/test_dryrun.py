"""The dry run against the real thing: every byte that the CPU's allocator handed out, and what a GPU would be given."""

import functools
import importlib.util
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import remat
from bench import memory
from bench.models import build
from remat import devices, exact, torch_internals
from remat.devices import Device
from remat.dryrun import DryRun, dry_run_partition
from remat.elsewhere import Answer, dry_runs
from remat.errors import DryRunFailed, SettingError
from remat.partitioner import decide
from remat.settings import Settings, resolve
from tests import graphs
from tests.test_numerics import SMALL

pytestmark = pytest.mark.usefixtures("no_collection")

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"layers": 4, "width": 64, "batch": 64},
    "gpt2": SMALL["gpt2"],
    "bert": {**SMALL["bert"], "layers": 1, "dropout": 0.1},
    "resnet": {"batch": 2},
    "unet": {"levels": 1, "width": 8, "pixels": 8, "batch": 2},
}
PLANS: dict[str, dict[str, Any]] = {
    "default": {"strict": True},
    "smallest": {"strict": True, "budget": "min", "exact": False},
}
SLOW = ("bert", "resnet", "unet")
# The default plan of a large graph takes as long to compile as the smallest, which has more kinds of kernels.
CASES = [
    # One worker for all tests of a model, which compile it once.
    pytest.param(name, plan, marks=[pytest.mark.xdist_group(f"dry run {name}"), *slow])
    for name, plan in itertools.product(MODELS, PLANS)
    for slow in [[pytest.mark.slow] if name == "unet" or (name in SLOW and plan == "default") else []]
]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install remat[triton]"
)


@dataclass(frozen=True)
class Case:
    """A step that ran under Inductor, and its dry run."""

    dry: DryRun
    measured: memory.StepMemory


@functools.cache
def ran(name: str, plan: str) -> Case:
    memory.install("cpu")
    torch.manual_seed(0)
    workload = build(name, **MODELS[name])
    settings, _ = resolve(PLANS[plan])
    decision = decide(graphs.joint_of(workload.model, *workload.args), settings)
    with exact.schedule(settings):
        dry = dry_run_partition(decision.partition, decision.joint)
    with torch_internals.without_compile_caches():
        compiled = torch.compile(workload.model, backend="remat", fullgraph=True, options=PLANS[plan])
        compiled(*workload.args).backward()
    assert remat.summaries()[-1].origin == "planned"
    measured = memory.step_memory(lambda: compiled(*workload.args), list(workload.model.parameters()))
    return Case(dry, measured)


@pytest.mark.inductor
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_peak_and_end_are_the_allocators_to_the_byte(name: str, plan: str) -> None:
    case = ran(name, plan)
    loss = 4  # the caller's, who holds it in the measurement too
    assert case.dry.peak_bytes == case.measured.peak_bytes
    assert case.dry.end_bytes == case.measured.end_bytes + loss
    assert case.dry.saved_bytes == case.measured.saved_bytes + loss
    alive = case.dry.alive_at_peak
    most, peak = sum(part.bytes for part in alive) + max(case.dry.scratch_bytes), case.dry.peak_bytes
    assert max(case.dry.alive_bytes) <= peak <= most, "what is alive at the peak adds up to it"
    assert all(part.buffer for part in alive)
    assert sum(bool(part.nodes) for part in alive) > len(alive) // 2


@pytest.mark.inductor
@pytest.mark.parametrize(("name", "plan"), [case for case in CASES if case.values[0] == "mlp"])
def test_where_no_kernel_takes_scratch_every_allocation_is_the_allocators(name: str, plan: str) -> None:
    case = ran(name, plan)
    assert list(case.dry.events) == [int(event) for event in case.measured.events]
    assert case.dry.boundary == case.measured.boundary


@pytest.mark.inductor
@pytest.mark.parametrize(("name", "plan"), [case for case in CASES if case.values[0] in ("gpt2", "resnet")])
def test_where_kernels_take_scratch_the_allocations_are_among_the_allocators_in_its_order(name: str, plan: str) -> None:
    case = ran(name, plan)
    born = [event for event in case.dry.events if event > 0]
    real = iter([int(event) for event in case.measured.events if event > 0])
    missing = [event for event in born if event not in real]  # consumes the real ones in order
    assert missing == []


# --- on a small graph, by hand -----------------------------------------------------------------------------------


def small(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).sum()


@pytest.fixture
def by_hand() -> DryRun:
    """tanh(x w), 16 x 8 floats (512 bytes); the gradients have 16 x 4 and 4 x 8."""
    joint = graphs.joint_of(small, graphs.leaf(16, 4), graphs.leaf(4, 8))
    decision = decide(joint, Settings(strict=True))
    return dry_run_partition(decision.partition, decision.joint)


def test_traffic_flops_and_launches_by_hand(by_hand: DryRun) -> None:
    forward, *_ = by_hand.extern_launches
    assert (forward.name, forward.flops) == ("aten.mm", 2 * 16 * 4 * 8)
    assert (forward.read_bytes, forward.written_bytes) == (4 * (16 * 4 + 4 * 8), 4 * 16 * 8)
    assert by_hand.extern_flops == 3 * 2 * 16 * 4 * 8
    assert by_hand.end_bytes == 4 * (16 * 4 + 4 * 8) + 4
    assert by_hand.kernel_launches == by_hand.kernel_count == len(by_hand.kernels) == 2


def test_roofline_by_hand(by_hand: DryRun) -> None:
    slow = Device("slow", ((4, 1e6),), 1e12, 1e12, 1e12, 1e-3)
    launches = by_hand.kernel_launches + len(by_hand.extern_launches)
    assert by_hand.step_seconds(slow) == pytest.approx(launches * 1e-3 + by_hand.extern_flops / 1e6, rel=1e-3)


def test_symbolic_sizes_count_as_those_at_hand(by_hand: DryRun) -> None:
    joint = graphs.joint_of(small, graphs.leaf(16, 4), graphs.leaf(4, 8), dynamic=True)
    decision = decide(joint, Settings(strict=True))
    dry = dry_run_partition(decision.partition, decision.joint)
    assert (dry.peak_bytes, dry.end_bytes) == (by_hand.peak_bytes, by_hand.end_bytes)


def test_a_backward_that_only_hands_on_its_gradient_is_no_error() -> None:
    answer = remat.dry_run(lambda x: x + 1, graphs.leaf(16, 4))
    assert answer.dry_run.saved_bytes == 16 * 4 * 4
    assert answer.dry_run.backward.kernels == ()


def test_a_function_without_a_gradient_is_refused_and_not_run() -> None:
    written = torch.zeros(4)
    with pytest.raises(ValueError, match="nothing here requires a gradient"):
        remat.dry_run(lambda x: x.add_(1), written)
    assert written.sum() == 0


@pytest.mark.parametrize("option", ["cpp_wrapper", "max_autotune"])
def test_options_that_a_dry_run_cannot_follow_are_refused(option: str) -> None:
    with pytest.raises(SettingError, match=f"{option} is not allowed in a dry run"):
        remat.dry_run(small, graphs.leaf(16, 4), graphs.leaf(4, 8), options={option: True})


def test_the_partition_is_left_as_it_was() -> None:
    joint = graphs.joint_of(small, graphs.leaf(16, 4), graphs.leaf(4, 8))
    decision = decide(joint, Settings(strict=True))
    before = [str(module.graph) for module in (decision.partition.forward, decision.partition.backward)]
    dry_run_partition(decision.partition, decision.joint)
    assert before == [str(module.graph) for module in (decision.partition.forward, decision.partition.backward)]


# --- a GPU that is not here --------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).float().pow(2).sum()


@functools.cache
def on_h200(dtype: torch.dtype, length: int = 256) -> Answer:
    tensors = [graphs.leaf(1, 2, length, 64, dtype=dtype) for _ in range(3)]
    return dry_runs(graphs.joint_of(attention, *tensors), "H200", [Settings(strict=True)])[0]


@needs_triton
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("dtype", "operator"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")], ids=["bfloat16", "float32"]
)
def test_attention_is_the_gpus_and_no_square_buffer_remains(dtype: torch.dtype, operator: str) -> None:
    dry = on_h200(dtype).dry_run
    assert {launch.name for launch in dry.extern_launches} == {
        f"aten._scaled_dot_product_{operator}_attention",
        f"aten._scaled_dot_product_{operator}_attention_backward",
    }
    assert max(block.bytes for block in dry.blocks) < 2 * 256 * 256 * dtype.itemsize
    assert all(block.bytes % 512 == 0 for block in dry.blocks)
    assert "@triton.jit" in dry.forward.source


@needs_triton
@pytest.mark.inductor
def test_pretending_leaves_this_process_as_it_was() -> None:
    on_h200(torch.bfloat16)
    assert not torch.cuda.is_available()
    assert devices.figures(torch.device("cpu")) is devices.CPU
    assert devices.figures(torch.device("cuda")).name == "A100", "no GPU is pretended here"


def test_an_unknown_gpu_is_refused_by_name() -> None:
    joint = graphs.joint_of(small, graphs.leaf(16, 4), graphs.leaf(4, 8))
    with pytest.raises(ValueError, match=r"target='B999' is not known: one of H200, H100, A100, L4, RTX 4090"):
        dry_runs(joint, "B999", [Settings()])


@needs_triton
@pytest.mark.inductor
def test_what_the_other_process_says_is_in_the_error() -> None:
    joint = graphs.joint_of(small, graphs.leaf(16, 4), graphs.leaf(4, 8))
    with pytest.raises(DryRunFailed, match="BudgetUnreachable"):
        dry_runs(joint, "H200", [Settings(strict=True, budget=64)])
