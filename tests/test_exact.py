"""Budgets under Inductor: the exact loop takes the first plan that fits, remembers it, and the schedule survives."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import remat
from bench import memory
from bench.models import build
from remat import exact, passes, torch_internals_schedule
from remat.budgets import PeakPlanner
from remat.dryrun import dry_run_partition
from remat.exact import Exactly, search
from remat.passes.apart import keep_matmuls_apart
from remat.plan import Plan, make_plan
from remat.settings import Settings
from remat.several import Memory, before_others
from tests import checks, graphs
from tests.test_numerics import SMALL

aten = torch.ops.aten
ENTRY = {"limit": 1, "peak_bytes": 1, "held_bytes": 1, "plan": ""}  # of no plan


# --- the search, by hand -----------------------------------------------------------------------------------------


@dataclass
class Ladder:
    """A planner whose plans are their predicted peaks, ten bytes apart; what recomputes least is the largest."""

    peaks: tuple[int, ...] = tuple(range(50, 210, 10))
    lowered: list[int] = field(default_factory=list)

    @cached_property
    def plans(self) -> list[Any]:
        return list(map(_AsPlan, self.peaks))

    def find(self, limit: int) -> Any:
        return max((plan for plan in self.plans if plan <= limit), default=None)

    @property
    def smallest_of_all(self) -> Any:
        return self.plans[0]

    def smallest_few(self, count: int) -> Any:
        return self.plans[:count]

    def peak_bytes(self, plan: Any) -> int:
        return int(plan)

    def of_step(self, memory: Memory) -> int:
        return memory.peak_bytes

    def found(self, budget: int, exact_peak: Callable[[int], int]) -> int:
        def exactly(plan: Any) -> Memory:
            self.lowered.append(int(plan))
            return Memory(exact_peak(int(plan)), 0)

        return int(cast(Any, search(cast(PeakPlanner, self), budget, exactly).plan))


class _AsPlan(int):
    """A plan that is its predicted peak, and itself alone: plans are compared by identity."""


def test_a_prediction_that_holds_is_lowered_once() -> None:
    ladder = Ladder()
    assert ladder.found(105, lambda peak: peak - 3) == 100
    assert ladder.lowered == [100]


def test_a_plan_that_is_too_large_tells_how_much_less_to_ask_for() -> None:
    ladder = Ladder()
    assert ladder.found(200, lambda peak: peak * 5 // 4) == 160
    assert ladder.lowered == [200, 160]


def test_where_nothing_fits_the_smallest_tried_is_taken_and_no_plan_is_lowered_twice() -> None:
    ladder = Ladder()
    assert ladder.found(55, lambda peak: peak + 40) == 50
    assert ladder.lowered == [50, 60, 70]
    ladder = Ladder(peaks=tuple(range(100, 200)))
    assert ladder.found(199, lambda peak: 300 - peak) == 199, "the exact peak is what counts"
    ladder = Ladder(peaks=tuple(range(100, 200)))
    ladder.found(199, lambda peak: peak + 1000)
    assert len(ladder.lowered) == len(set(ladder.lowered)) <= exact.MOST_TRIES + exact.TRIES_FOR_MIN


def test_before_a_budget_is_given_up_the_plans_that_min_tries_are_tried() -> None:
    ladder = Ladder(peaks=tuple(range(100, 200)))
    exact_peaks = dict.fromkeys(ladder.peaks, 300) | {102: 90}
    assert ladder.found(0, exact_peaks.__getitem__) == 102
    assert ladder.found(90, exact_peaks.__getitem__) == 102


def test_min_takes_the_least_exact_peak_of_those_of_least_predicted_peak() -> None:
    assert Ladder().found(0, lambda peak: 200 - peak) == 70


# --- on graphs ---------------------------------------------------------------------------------------------------


def exactly(name: str, graph: str | None = None, **values: Any) -> Exactly:
    return Exactly(graphs.planner(name, replace(Settings(), **values)), graph)


@pytest.mark.parametrize("budget", [0.8, "min"])
def test_the_plan_that_is_settled_keeps_the_budget_by_its_dry_run(budget: float | str) -> None:
    exactly_ = exactly("residual", budget=budget, strict=True)
    settled = exactly_.settle()
    with exact.schedule(exactly_.planner.settings):
        dry = dry_run_partition(settled.partition, exactly_.planner.joint)
    assert settled.memory == (dry.peak_bytes, dry.saved_bytes)
    if budget != "min":
        assert dry.peak_bytes <= exactly_.planner.allowed_bytes
        assert settled.candidate.certificate is not None
        assert settled.candidate.certificate.budget_bytes == exactly_.planner.allowed_bytes


def test_a_budget_below_every_plan_is_an_error_under_strict_and_a_warning_else() -> None:
    with pytest.raises(remat.BudgetUnreachable, match=r"budget=100 allows a peak of 100 bytes.*under Inductor"):
        exactly("residual", budget=100, strict=True).settle()
    with pytest.warns(remat.RematWarning, match="taking the smallest"):
        assert exactly("residual", budget=100).settle().memory


def test_what_was_found_is_remembered_and_a_broken_document_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = []

    def counted(self: Exactly, plan: Plan) -> Memory:
        lowered.append(plan)
        return original(self, plan)

    original = Exactly.memory
    monkeypatch.setattr(Exactly, "memory", counted)
    first = exactly("residual", "key", budget=0.8, cache_dir=str(tmp_path)).settle()
    count = len(lowered)
    assert count
    again = exactly("residual", "key", budget=0.8, cache_dir=str(tmp_path)).settle()
    assert len(lowered) == count, "nothing is lowered again"
    assert exact.digest(again.candidate.plan) == exact.digest(first.candidate.plan)
    assert again.memory == first.memory
    path = tmp_path / exact.DOCUMENT
    for graphs_ in ({"key": 3}, {"key": {"limit": "x"}}, {"key": ENTRY}, 7):
        path.write_text(json.dumps({"format": 1, "graphs": graphs_}))
        found = exactly("residual", "key", budget=0.8, cache_dir=str(tmp_path)).settle()
        assert found.memory == first.memory
        assert len(lowered) > count
        count = len(lowered)


def test_what_no_dry_run_can_follow_is_planned_by_prediction_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._inductor.config.patch(cpp_wrapper=True), pytest.warns(remat.RematWarning, match="cpp_wrapper"):
        assert exactly("residual", budget=0.8).settle().memory is None

    def broken(*_: Any) -> int:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Exactly, "memory", broken)
    with pytest.warns(remat.RematWarning, match="by prediction only: RuntimeError: no such kernel"):
        assert exactly("residual", budget=0.8).settle().memory is None
    with pytest.raises(RuntimeError, match="no such kernel"):
        exactly("residual", budget=0.8, strict=True).settle()


@pytest.mark.parametrize(
    "values",
    [{}, {"budget": 0.5, "exact": False}, {"budget": 0.5, "inner": "eager"}, {"budget": 0.5, "partitioner": "torch"},
     {"budget": 0.5, "plan_seed": 1}],
)  # fmt: skip
def test_nothing_is_lowered_where_no_budget_has_to_be_held(values: dict[str, Any]) -> None:
    assert not exact.is_wanted(graphs.planner("mlp", Settings(**values)))
    planner = graphs.planner("mlp", Settings(budget=0.5))
    assert exact.is_wanted(planner)
    assert not exact.is_wanted(replace(planner, share=before_others())), "others follow of which nothing is known"


def test_a_fraction_at_symbolic_sizes_is_held_by_prediction() -> None:
    joints = []

    def keep(joint: Any, *_: Any, **__: Any) -> Any:
        joints.append(joint)
        raise remat.UnsupportedGraph("kept")

    w, x = graphs.leaf(8, 8), torch.randn(5, 8)
    with pytest.MonkeyPatch.context() as patch, pytest.warns(remat.RematWarning, match="kept"):
        patch.setattr("remat.partitioner.decide", keep)
        torch.compile(lambda a: (a @ w).tanh().sum(), backend="remat", dynamic=True, options={"inner": "eager"})(x)
    (joint,) = joints
    assert joint.has_symbolic_sizes
    assert not exact.is_wanted(graphs.planner_of(joint, Settings(budget=0.5)))
    assert exact.is_wanted(graphs.planner_of(joint, Settings(budget=10**6)))


# --- the schedule ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Embeddings used twice: the gradient of the last product is added to the first layer's at the very end."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(16, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.embedding(tokens, self.words)
        for layer in self.layers:
            x = layer(x).tanh()
        return (x @ self.words.t()).log_softmax(-1).square().sum()


def test_the_matmul_of_tied_weights_stays_where_it_is_bit_for_bit() -> None:
    planner = graphs.planner_of(graphs.joint_of(Tied(), torch.arange(16).repeat(8)), Settings(budget=0.9))
    partition = Exactly(replace(planner, settings=Settings(inner="eager")), None).predicted().partition
    apart = keep_matmuls_apart(partition)

    def count(target: Any) -> tuple[int, int]:
        halves = (partition.backward, apart.backward)
        return tuple(sum(node.target is target for node in half.graph.nodes) for half in halves)  # type: ignore

    assert count(aten.add.Tensor) == (count(aten.add.Tensor)[1] + 1, count(aten.add.Tensor)[1])
    assert count(aten.neg.default) == (count(aten.neg.default)[1] - 1, count(aten.neg.default)[1])
    assert "addmm" not in {node.name for node in apart.backward.graph.nodes if node.target is aten.addmm.default}
    truth = checks.run_joint(planner.joint)
    checks.check_same_bits(checks.run_partition(apart, planner.joint), truth)


@pytest.mark.parametrize("name", ["mlp", "residual", "chain"])
def test_matmuls_that_hold_nothing_are_left_to_inductor(name: str) -> None:
    partition = exactly(name, inner="eager").predicted().partition
    names = [node.name for node in partition.backward.graph.nodes]
    assert [node.name for node in keep_matmuls_apart(partition).backward.graph.nodes] == names


def stages(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """The backward needs the cosine, then the sine, with matmuls between; both are computed from x."""
    hidden = (x.sin() @ first).tanh()
    return ((x.cos() @ second + hidden @ third).tanh()).sum()


def test_recomputation_of_two_stages_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(budget=0.9, exact=False)
    weights = [graphs.leaf(128, 128) for _ in range(3)]
    planner = graphs.planner_of(graphs.joint_of(stages, torch.randn(128, 128), *weights), settings)
    joint = planner.joint
    inputs = [node for node in joint.nodes if node.op == "placeholder" and node in joint.required_forward]
    kept = [node for node in joint.nodes if node.target is aten.tanh.default]
    partition = passes.rewrite(make_plan(joint, [*inputs, *kept], "test"), planner.rules)

    def of_both() -> int:
        """Kernels of the backward that run the sine and the cosine."""
        with exact.schedule(settings):
            kernels = dry_run_partition(partition, joint).backward.kernels
        recomputed = [{name for name in ("sin", "cos") if name in kernel.nodes} for kernel in kernels]
        assert {"sin", "cos"} == set().union(*recomputed), "both run again"
        return sum(len(names) == 2 for names in recomputed)

    assert of_both() == 0
    monkeypatch.setattr(torch_internals_schedule._LateRecomputation, "allows", lambda *_: True)
    assert of_both() == 1, "what Inductor does by itself"


def test_the_users_heuristics_of_fusion_are_still_asked() -> None:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    asked = []

    class Mine(InductorChoices):
        def can_fuse_horizontal(self, *arguments: Any) -> bool:  # type: ignore[override]
            asked.append(arguments)
            return False

    planner = graphs.planner("residual", Settings(budget=0.9, exact=False))
    partition = Exactly(planner, None).predicted().partition
    with V.set_choices_handler(Mine()), torch_internals_schedule.kept_schedule():
        assert isinstance(V.choices, InductorChoices)
        dry_run_partition(partition, planner.joint)
    assert asked


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_the_schedule_is_kept_under_a_budget_alone(inner: str) -> None:
    assert not Settings(inner=inner).keeps_schedule()
    assert Settings(inner=inner, budget=0.5).keeps_schedule() == (inner == "inductor")
    assert isinstance(exact.schedule(Settings(inner=inner)), contextlib.nullcontext)


@pytest.mark.inductor
@pytest.mark.usefixtures("no_collection")
def test_the_measured_peak_is_the_exact_one_and_within_the_budget() -> None:
    memory.install("cpu")
    workload = build("gpt2", **SMALL["gpt2"])
    compiled = torch.compile(workload.model, backend="remat", options={"budget": 0.8, "strict": True})
    compiled(*workload.args).backward()
    summary = remat.summaries()[-1]
    measured = memory.step_memory(lambda: compiled(*workload.args), list(workload.model.parameters()))
    assert measured.peak_bytes == summary.exact_peak_bytes <= summary.budget_bytes
    assert "exact peak" in summary.line()
