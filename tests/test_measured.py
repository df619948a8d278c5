"""Operators timed: which, under which key, how truly, for how long, and that what is stored stays."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import measured
from remat.joint import JointGraph
from remat.measured import Operator, Sample
from remat.store import Store
from tests import graphs

CPU = torch.device("cpu")
NAME = "timings-test.json"


def operators(joint: JointGraph) -> dict[str, Operator]:
    """What is timed of a graph, by the node's name."""
    described = {node.name: measured.describe(node) for node in joint.nodes}
    return {name: operator for name, operator in described.items() if operator is not None}


def product(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> JointGraph:
    return graphs.joint_of(torch.mm, graphs.leaf(m, k, dtype=dtype), graphs.leaf(k, n, dtype=dtype))


def sample(key: str = "k", seconds: float = 1e-3, family: str = "matmul") -> Sample:
    return Sample(key, family, 2_000, 300, () if family == "other" else (1, 10, 10, 10), 4, seconds)


def test_only_what_inductor_calls_outside_its_kernels_is_timed():
    found = {name: operators(graphs.joint(name)) for name in ("mlp", "convnet", "sdpa", "dropout", "loss", "counter")}
    kinds = {name: {key.split("(")[0] for key in (op.key for op in ops.values())} for name, ops in found.items()}
    flash = "aten._scaled_dot_product_flash_attention_for_cpu"
    products = {"aten.mm.default", "aten.addmm.default"}
    assert kinds["mlp"] == kinds["dropout"] == kinds["loss"] == kinds["counter"] == products
    assert kinds["convnet"] == {"aten.convolution.default", "aten.convolution_backward.default"}
    assert kinds["sdpa"] - products == {f"{flash}.default", f"{flash}_backward.default"}
    assert {op.family for op in found["convnet"].values()} == {"convolution"}
    assert {op.family for op in found["sdpa"].values()} == {"matmul", "attention"}


def test_operators_without_code_of_inductor_are_timed_and_custom_random_and_symbolic_ones_are_not():
    def transform(x: Tensor, w: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3).sum() + torch.linalg.inv(w).sum()

    found = operators(graphs.joint_of(transform, graphs.leaf(1, 2, 8, 8), graphs.leaf(4, 4)))
    assert any(operator.family == "other" and "inv" in operator.key for operator in found.values())
    assert not any("attention" in operator.key for operator in found.values())
    assert operators(graphs.joint_of(torch.mm, graphs.leaf(6, 8), graphs.leaf(8, 8), dynamic=True)) == {}

    @torch.library.custom_op("remat_test::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    scaled.register_fake(torch.empty_like)
    scaled.register_autograd(lambda context, gradient: gradient * 2)
    assert operators(graphs.joint_of(lambda x: scaled(x), graphs.leaf(4))) == {}


def test_sizes_flops_and_bytes_of_each_family():
    (forward,) = (op for op in operators(product(16, 8, 4)).values() if op.dims == (1, 16, 4, 8))
    assert (forward.flops, forward.bytes, forward.itemsize) == (2 * 16 * 8 * 4, 4 * (16 * 8 + 8 * 4 + 16 * 4), 4)

    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, stride=2, padding=1)

    found = operators(graphs.joint_of(convolve, graphs.leaf(2, 6, 8, 8), graphs.leaf(10, 6, 3, 3)))
    assert {op.dims for op in found.values()} == {(2 * 4 * 4, 6, 10, 9)}
    ahead, back = sorted(op.flops for op in found.values())
    assert back == 2 * ahead == 4 * 32 * 6 * 10 * 9
    found = operators(graphs.joint_of(F.conv_transpose2d, graphs.leaf(2, 6, 4, 4), graphs.leaf(6, 10, 2, 2)))
    assert {op.dims for op in found.values()} == {(2 * 4 * 4, 6, 10, 4)}
    attention = [op for op in operators(graphs.joint("sdpa")).values() if op.family == "attention"]
    assert {op.dims for op in attention} == {(4, 8, 8, 8)}


def test_keys_tell_shapes_strides_and_dtypes_apart():
    def transposed(x: Tensor, y: Tensor) -> Tensor:
        return x.t().mm(y)

    joints = [
        product(8, 8, 4), product(8, 8, 2), product(8, 8, 4, torch.float64),
        graphs.joint_of(transposed, graphs.leaf(8, 8), graphs.leaf(8, 4)),
    ]  # fmt: skip
    keys = [next(iter(operators(joint).values())).key for joint in joints]
    assert len(set(keys)) == 4
    assert keys[0] == "aten.mm.default(float32 cpu [8, 8] [8, 1], float32 cpu [8, 4] [4, 1])"


def test_keys_are_the_same_in_every_process():
    code = "from tests import graphs, test_measured as t\nfor n in ('sdpa', 'convnet'): print(*sorted(o.key for o in "
    code += "t.operators(graphs.joint(n)).values()), sep='\\n')"
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", code]
    there = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=100)
    here = [sorted(op.key for op in operators(graphs.joint(name)).values()) for name in ("sdpa", "convnet")]
    assert there.stdout.splitlines() == [*here[0], *here[1]]


def test_time_of_a_product_is_about_that_of_running_it():
    # The least of several rounds of both: another process may take the core at any moment.
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    direct = []
    for _ in range(30):
        started = time.perf_counter()
        torch.mm(x, y)
        direct.append(time.perf_counter() - started)
    timed = [s for s in measured.time_operators(product(256, 256, 256), {}, 5.0) if s.dims == (1, 256, 256, 256)]
    assert len(timed) == 3  # forward, and two with a transposed argument
    assert min(direct) / 3 < min(s.seconds for s in timed) < min(direct) * 3


@pytest.mark.parametrize("name", ["sdpa", "convnet", "attention", "multi_output"])
def test_every_operator_runs_on_made_up_numbers_and_leaves_the_random_state(name: str):
    joint = graphs.joint(name)
    before = torch.get_rng_state()
    timed = measured.time_operators(joint, {}, 5.0)
    assert {s.key for s in timed} == {op.key for op in operators(joint).values()}
    assert all(0 < s.seconds < 1 for s in timed)
    assert torch.equal(torch.get_rng_state(), before)
    assert measured.time_operators(joint, {s.key: s.seconds for s in timed}, 5.0) == []


def test_arguments_lie_in_memory_as_in_the_graph():
    expanded = torch.empty(1, 3).expand(4, 3)
    padded = torch.empty(8, 5)[:, :3]
    for value in (expanded, padded, torch.empty(4, 3).t(), torch.empty(0, 3), torch.empty(())):
        made = measured._made(value, "self", CPU)
        assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)
    assert measured._made(torch.empty(300, 300), "self", CPU).std() == pytest.approx(0.1, rel=0.1)
    assert not measured._made(torch.empty(3, dtype=torch.int64), "index", CPU).any()
    assert measured._made(torch.empty(3, dtype=torch.bool), "attn_mask", CPU).all()


def test_the_limit_holds_and_the_dearest_come_first(monkeypatch: pytest.MonkeyPatch):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 512), nn.Linear(512, 8))
    joint = graphs.joint_of(net, torch.randn(64, 8))
    everything = operators(joint)
    assert measured.time_operators(joint, {}, 0.0) == []
    tried: list[Operator] = []
    ticks = itertools.count()

    def seconds(operator: Operator, *_: Any) -> float:
        tried.append(operator)
        return 1e-4

    monkeypatch.setattr(measured, "_seconds", seconds)
    monkeypatch.setattr(measured.time, "perf_counter", lambda: float(next(ticks)))
    timed = measured.time_operators(joint, {}, 3.5)
    assert [s.key for s in timed] == [op.key for op in tried]
    assert len(tried) == 3 < len({op.key for op in everything.values()})
    assert {op.flops for op in tried} == {max(op.flops for op in everything.values())}


def test_an_operator_that_does_not_run_is_logged_and_left_out(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(measured.logger, "warning", lambda text, *values: said.append(text % values))
    measure = measured._best

    def picky(run: Any, *rest: Any) -> float:
        result = run()
        if isinstance(result, Tensor) and result.shape == (32, 4):
            raise RuntimeError("not these numbers")
        return measure(run, *rest)

    monkeypatch.setattr(measured, "_best", picky)
    timed = measured.time_operators(graphs.joint("mlp"), {}, 5.0)
    every = {op.key: op for op in operators(graphs.joint("mlp")).values()}
    (left_out,) = every.keys() - {s.key for s in timed}
    assert every[left_out].dims == (1, 32, 4, 16)
    assert said == [f"{left_out} is not timed, it does not run on random numbers: not these numbers"]


def test_an_operator_that_would_fill_the_memory_is_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "free_bytes", lambda device: 100)
    assert measured.time_operators(product(16, 8, 4), {}, 5.0) == []


def test_the_first_writer_wins_and_the_generation_stays(tmp_path: Path):
    store = Store(tmp_path)
    assert measured.load(store, NAME) == ("", {})
    assert measured.add(store, NAME, [sample("a", 1e-3)]) == {"a": sample("a", 1e-3)}
    generation, _ = measured.load(store, NAME)
    assert measured.add(store, NAME, [sample("a", 2e-3), sample("b", 3e-3)])["a"].seconds == 1e-3
    again, samples = measured.load(store, NAME)
    assert again == generation != ""
    assert samples == {"a": sample("a", 1e-3), "b": sample("b", 3e-3)}


def test_malformed_entries_are_left_out_and_made_anew(tmp_path: Path):
    store = Store(tmp_path)
    measured.add(store, NAME, [sample("a"), sample("b"), sample("c"), sample("d", family="other")])
    document = store.read(NAME)
    assert document is not None
    document["samples"]["a"]["seconds"] = -1.0
    document["samples"]["b"] = ["no sample"]
    document["samples"]["c"]["key"] = "another"
    store.update(NAME, lambda _: document)
    assert list(measured.load(store, NAME)[1]) == ["d"]
    assert measured.add(store, NAME, [sample("a", 5.0)])["a"].seconds == 5.0
    store.update(NAME, lambda _: {"samples": [1]})
    assert measured.load(store, NAME) == ("", {})


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 0.0}, {"seconds": float("nan")}, {"seconds": "1"}, {"seconds": True}, {"flops": -1},
        {"bytes": 1.5}, {"dims": [1, 2]}, {"dims": 3}, {"family": "matmuls"}, {"key": 3}, {"more": 1},
    ],
)  # fmt: skip
def test_a_malformed_sample_is_a_value_error(change: dict[str, Any]):
    assert Sample.from_dict(sample().to_dict()) == sample()
    with pytest.raises(ValueError, match="no timed operator"):
        Sample.from_dict(sample().to_dict() | change)


def test_seconds_of_a_graph_are_the_stored_ones(tmp_path: Path):
    joint, store = graphs.joint("mlp"), Store(tmp_path)
    seconds = measured.seconds_of(joint, store, NAME)
    assert {node.name for node in seconds} == set(operators(joint))
    assert measured.seconds_of(joint, store, NAME, limit_seconds=0.0) == seconds
    stored = measured.load(store, NAME)[1]
    assert {measured.describe(node).key: s for node, s in seconds.items()} == {k: s.seconds for k, s in stored.items()}


def test_the_grid_holds_every_family_under_the_keys_of_graphs():
    steps: list[tuple[int, int]] = []
    timed = measured.time_grid(CPU, 2.0, lambda done, of: steps.append((done, of)))
    assert steps[0][0] == 1 and 60 < steps[0][1] < 150
    assert {s.family for s in timed} == {"matmul", "convolution", "attention"}
    keys = {s.key for s in timed}
    graph = operators(product(64, 64, 64))
    assert any(op.key in keys for op in graph.values())
    heads = torch.randn(2, 4, 64, 64, requires_grad=True), torch.randn(2, 4, 64, 64), torch.randn(2, 4, 64, 64)
    attention = operators(graphs.joint_of(F.scaled_dot_product_attention, *heads))
    assert {dataclasses.replace(op, key="") for op in attention.values()} <= {
        Operator("", s.family, s.flops, s.bytes, s.dims, s.itemsize) for s in timed
    }
