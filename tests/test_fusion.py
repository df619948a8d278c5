"""Predicted kernels against those that Inductor generates: traffic, number, and the ratio between plans."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.models import build, parse_spec
from remat import exact
from remat.buffers import CPU_LIMITS, Half, contiguous, merged, normal
from remat.capture import joint_graph
from remat.dryrun import dry_run_partition
from remat.estimate import Estimate
from remat.fusion import Lowering, kernels_of, predict
from remat.partitioner import decide
from remat.settings import Settings
from tests import graphs
from tests.graphs import leaf

PLANS = (Settings(partitioner="torch"), Settings(strict=True), Settings(plan_seed=0), Settings(plan_seed=1))
# Measured over these models and plans (torch 2.13, CPU): generated traffic 0.94 to 1.05 of Inductor's own figures,
# kernels 0.88 to 1.09, and between two plans of a model the ratio of all traffic within 3.3%.
GENERATED, KERNELS, RATIO = 0.08, 0.16, 0.05
MODELS = ("mlp:layers=3", "gpt2:layers=1", "bert:layers=1", "llama:layers=1", "vit:layers=1")


@functools.cache
def _both(model: str) -> list[tuple[Lowering, Any]]:
    """Each plan of a model as predicted and as generated."""
    name, overrides = parse_spec(model)
    workload = build(name, **overrides)
    joint = joint_graph(workload.model, *workload.args)
    found = []
    for settings in PLANS:
        decision = decide(joint, settings)
        with exact.schedule(settings):
            dry = dry_run_partition(decision.partition, decision.joint)
        found.append((predict(decision.chosen.plan, settings.keeps_schedule()), dry))
    return found


def _generated(lowering: Lowering) -> int:
    return sum(kernel.read_bytes + kernel.written_bytes for kernel in lowering.kernels if not kernel.extern)


@pytest.mark.inductor
@pytest.mark.parametrize("model", MODELS)
def test_traffic_and_kernels_are_those_of_the_generated_code(model: str) -> None:
    for predicted, real in _both(model):
        traffic = sum(kernel.read_bytes + kernel.written_bytes for kernel in real.kernels)
        assert abs(_generated(predicted) / traffic - 1) < GENERATED
        assert abs(predicted.kernel_count / len(real.kernels) - 1) < KERNELS
        assert sum(kernel.extern for kernel in predicted.kernels) == len(real.extern_launches)
    (first, truth), *others = _both(model)
    for predicted, real in others:
        ratio = predicted.traffic_bytes / first.traffic_bytes
        assert abs(ratio / (real.traffic_bytes / truth.traffic_bytes) - 1) < RATIO


def kernels(fn: Any, *args: Any, dynamic: bool | None = None) -> Lowering:
    """PyTorch's plan of a function, lowered by prediction."""
    joint = graphs.joint_of(fn, *args, dynamic=dynamic)
    return predict(graphs.planner_of(joint).torch_default().plan)


def _names(lowering: Lowering) -> list[set[str]]:
    order = lowering.forward_order
    return [{order[step].name for step in kernel.steps} for kernel in lowering.forward if not kernel.extern]


def test_a_pointwise_chain_is_one_kernel_that_reads_and_writes_once() -> None:
    lowering = kernels(lambda x: torch.relu(x * 2 + 1) * 3, leaf(64, 32))
    (kernel,) = lowering.forward
    assert (kernel.read_bytes, kernel.written_bytes) in [(64 * 32 * 4, 64 * 32 * 4), (64 * 32 * 4, 64 * 32 * 5)]


def test_what_a_matmul_reads_is_written_and_read() -> None:
    lowering = kernels(lambda x, w: (torch.relu(x) @ w).sum(), leaf(64, 32), leaf(32, 16))
    names = _names(lowering)
    assert any("relu" in name for name in names), "the operand of a matmul is in memory"
    (product,) = [kernel for kernel in lowering.forward if kernel.extern]
    assert product.read_bytes == (64 * 32 + 32 * 16) * 4 and product.written_bytes == 64 * 16 * 4


def test_softmax_over_rows_shares_its_loop_over_rows_on_a_cpu() -> None:
    lowering = kernels(lambda x: torch.softmax(x, -1), leaf(128, 64))
    assert len(lowering.forward) == 1


def test_parts_of_a_concatenation_are_written_into_it() -> None:
    lowering = kernels(lambda a, b, w: (torch.cat([a * 2, b * 3], 1) @ w).sum(), leaf(8, 4), leaf(8, 6), leaf(10, 4))
    generated = [kernel for kernel in lowering.forward if not kernel.extern]
    assert sum(kernel.written_bytes for kernel in generated) >= 8 * 10 * 4


def test_two_pieces_of_one_value_are_two_reads() -> None:
    def fn(x: Tensor) -> Tensor:
        a, b = x.split(16, 1)
        return a * b.exp()

    (kernel,) = kernels(fn, leaf(64, 32)).forward
    assert kernel.read_bytes == 64 * 32 * 4


def test_random_numbers_and_gathers_are_counted() -> None:
    def fn(table: Tensor, rows: Tensor) -> Tensor:
        return F.dropout(F.embedding(rows, table), 0.5).sum()

    lowering = kernels(fn, leaf(100, 16), torch.randint(0, 100, (32,)))
    assert lowering.kernel_count and lowering.traffic_bytes > 32 * 16 * 4


@pytest.mark.parametrize("name", sorted(graphs.MODELS))
def test_every_graph_and_plan_has_a_prediction(name: str) -> None:
    planner = graphs.planner_of(graphs.joint(name))
    for candidate in (planner.torch_default(), planner.smallest(), planner.random(3)):
        estimate = Estimate(candidate.plan, planner.costs)
        assert estimate.step_seconds > 0
        steps = {node for node in (*candidate.plan.forward, *candidate.plan.backward) if node.op == "call_function"}
        lowering = estimate.lowering
        known = {lowering.forward_order[step] for kernel in lowering.forward for step in kernel.steps}
        known |= {lowering.backward_order[step] for kernel in lowering.backward for step in kernel.steps}
        assert known <= steps


def test_symbolic_sizes_are_predicted_at_their_nominal_ones() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x.reshape(-1, 8) @ w).sum()

    assert kernels(fn, leaf(5, 8), leaf(8, 8), dynamic=True).traffic_bytes > 0


def test_a_recomputed_value_adds_what_it_reads() -> None:
    planner = graphs.planner_of(graphs.joint("chain"))
    kept, dropped = planner.torch_default(), planner.smallest()
    assert dropped.estimate.extern_flops > kept.estimate.extern_flops
    assert dropped.estimate.step_seconds > kept.estimate.step_seconds


def test_loops_merge_where_every_layout_allows_it() -> None:
    shape = (4, 8, 16)
    assert merged([contiguous(shape)], shape) == (4 * 8 * 16,)
    assert merged([contiguous(shape), (shape, (0, 16, 1))], shape) == (4, 8 * 16)
    assert merged([contiguous(shape), (shape, (8, 1, 0))], shape) == (4 * 8, 16)
    assert normal((shape, (8, 1, 0))) == ((32,), (1,)), "a row read along its columns is the row"


def test_a_half_without_outputs_writes_nothing() -> None:
    joint = graphs.joint_of(lambda x: torch.relu(x).sum(), leaf(8, 8))
    nodes = [node for node in joint.nodes if node.op == "call_function"]
    half = Half(nodes[:1], [], CPU_LIMITS)
    assert not [kernel for kernel in kernels_of(half) if kernel.written_bytes]
