"""Budgets: a peak that holds to the byte, never more recomputation for more memory, and a certificate that is one."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from remat import passes
from remat.budgets import MIN_FORWARDS, PeakPlanner
from remat.errors import BudgetUnreachable, RematWarning
from remat.memory import Role, simulate
from remat.plan import Plan
from remat.plans import Candidate, Planner
from remat.rules import why_invalid
from remat.settings import Settings
from tests import checks, graphs
from tests.test_memory import measure

pytestmark = pytest.mark.usefixtures("no_collection")

EAGER = Settings(inner="eager", strict=True)
FRACTIONS = [0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0]


def peak_planner(name: str, settings: Settings = EAGER) -> tuple[Planner, PeakPlanner]:
    planner = graphs.planner(name, settings)
    torchs = planner.torch_default()
    seeds = [planner.default(torchs).plan, torchs.plan]
    known = planner.joint, planner.costs, planner.rules, settings, planner.scratch
    return planner, PeakPlanner(*known, seeds, planner.estimate_of)


def chosen(name: str, budget: float | int | str, **values: object) -> Candidate:
    return graphs.planner(name, replace(EAGER, budget=budget, **values)).choose()[0]


# --- the points of the frontier, as plans ------------------------------------------------------------------------


@pytest.mark.parametrize("name", graphs.MODELS)
def test_every_point_is_a_valid_plan_whose_simulated_and_measured_peak_are_the_searchs(name: str):
    planner, peaks = peak_planner(name)
    problem = peaks.step.problem
    assert peaks.frontier.points
    for point in peaks.frontier.points:
        assert problem.why_illegal(point.sequence) is None
        plan = peaks.step.plan_of(point.sequence, point.origin)
        assert why_invalid(plan, planner.rules) is None
        assert peaks.peak_bytes(plan) == point.peak == problem.peak(point.sequence)
        assert peaks.step.sequence_of(plan) == point.sequence
        partition = passes.rewrite(plan, planner.rules)
        measured = measure(partition, planner.joint)
        timeline = simulate(plan)
        assert max(measured.alive_bytes.values()) == timeline.peak_bytes
        assert measured.peak_bytes == point.peak


@pytest.mark.parametrize("name", graphs.MODELS)
def test_every_point_gives_the_joint_graphs_results_to_the_bit(name: str):
    planner, peaks = peak_planner(name)
    truth = checks.run_joint(planner.joint)
    for point in peaks.frontier.points[::3] or peaks.frontier.points:
        partition = passes.rewrite(peaks.step.plan_of(point.sequence, "search"), planner.rules)
        checks.check_same_bits(checks.run_partition(partition, planner.joint), truth)


def runs_again_twice(plan: Plan) -> bool:
    return any(name.endswith("__run3") for name in plan.backward_names)


def test_values_are_made_again_more_than_once_where_that_pays():
    _, peaks = peak_planner("residual")
    plans = [peaks.step.plan_of(point.sequence, "search") for point in peaks.frontier.points]
    assert any(map(runs_again_twice, plans))


@pytest.mark.parametrize("name", ["mlp", "residual", "bottleneck"])
def test_what_is_alive_at_the_peak_adds_up_to_it(name: str):
    candidate = chosen(name, "min")
    timeline = candidate.timeline
    assert sum(life.bytes for life in timeline.alive_at_peak) == timeline.peak_bytes
    assert Role.GRADIENT in {life.role for life in timeline.lives}
    assert any(life.role is Role.RECOMPUTED for life in timeline.lives)


# --- budgets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["mlp", "residual", "attention", "embedding", "bottleneck"])
def test_budget_is_kept_and_a_larger_one_has_no_lower_peak_and_recomputes_no_more(name: str, inner: str):
    planner = graphs.planner(name, replace(EAGER, inner=inner))
    default = planner.choose()[0].peak_bytes
    smallest = chosen(name, "min", inner=inner)
    peaks, costs = [], []
    for fraction in FRACTIONS:
        allowed = int(fraction * default)
        if allowed < smallest.peak_bytes:
            continue
        candidate = chosen(name, allowed, inner=inner)
        assert candidate.peak_bytes <= allowed
        assert candidate.certificate is not None
        peaks.append(candidate.peak_bytes)
        costs.append(candidate.certificate.recompute_seconds)
    assert peaks
    assert costs == sorted(costs, reverse=True)
    if inner == "eager":
        assert peaks == sorted(peaks)
        assert chosen(name, default).peak_bytes == peaks[-1] <= default
        torchs = graphs.planner(name, replace(EAGER, partitioner="torch")).choose()[0].peak_bytes
        assert chosen(name, 1.0).peak_bytes <= torchs
        share = smallest.peak_bytes / torchs + 0.01
        least = chosen(name, share)
        assert least.certificate is not None
        assert least.certificate.budget_bytes == int(share * torchs), "a share of the peak of PyTorch's default plan"
        assert least.peak_bytes <= int(share * torchs)


@pytest.mark.parametrize("name", graphs.MODELS)
def test_min_is_below_the_default_and_recomputes_no_more_than_it_may(name: str):
    planner = graphs.planner(name, EAGER)
    smallest = chosen(name, "min")
    assert smallest.peak_bytes <= planner.choose()[0].peak_bytes
    flops = planner.costs.flops
    forward = sum(count for node, count in flops.items() if node in planner.joint.required_forward)
    again = sum(count for node in smallest.plan.recomputed for n, count in flops.items() if n.name == node.name)
    assert again <= MIN_FORWARDS * max(forward, 1)


def test_unreachable_budget_warns_with_the_smallest_peak_and_takes_its_plan():
    planner = graphs.planner("residual", replace(EAGER, strict=False, budget=64))
    with pytest.warns(RematWarning, match=r"budget=64 allows a peak of 64 bytes") as caught:
        candidate, _ = planner.choose()
    assert len(caught) == 1
    assert f"{candidate.peak_bytes:,}" in str(caught[0].message)
    assert candidate.certificate is not None
    assert candidate.peak_bytes == candidate.certificate.smallest_peak_bytes
    assert f"{candidate.certificate.peak_bound_bytes:,}" in str(caught[0].message)


def test_unreachable_budget_raises_under_strict():
    with pytest.raises(BudgetUnreachable, match="the smallest plan found for this graph has"):
        chosen("residual", 64)


def test_the_smallest_peak_is_a_budget_without_a_warning():
    smallest = chosen("residual", "min").certificate
    assert smallest is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", RematWarning)
        candidate = chosen("residual", smallest.smallest_peak_bytes)
    assert candidate.peak_bytes == smallest.smallest_peak_bytes


@pytest.mark.parametrize("name", graphs.MODELS)
def test_certificates_bounds_are_below_the_plan(name: str):
    _, peaks = peak_planner(name)
    bound = peaks.step.problem.lower_bound_bytes()
    for place, point in enumerate(peaks.frontier.points):
        certificate = peaks.certificate(peaks.step.plan_of(point.sequence, "search"), point.peak)
        assert bound == certificate.peak_bound_bytes <= point.peak
        assert 0 <= certificate.recompute_bound_seconds <= certificate.recompute_seconds
        assert certificate.smallest_peak_bytes == peaks.frontier.points[0].peak
        assert place == 0 or certificate.recompute_seconds < certificate.step_seconds * 100


# --- rules hold in every plan ------------------------------------------------------------------------------------


def draws(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.dropout(torch.tanh(x @ w), 0.3, True) * torch.rand_like(x)
    return x.sum()


def test_random_draws_run_once_at_every_budget():
    joint = graphs.joint_of(draws, graphs.leaf(32, 16), graphs.leaf(16, 16))
    for budget in ("min", 0.6, 0.8, 0.95):
        planner = graphs.planner_of(joint, replace(EAGER, strict=False, budget=budget))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RematWarning)
            plan = planner.choose()[0].plan
        partition = passes.rewrite(plan, planner.rules)  # the verifier refuses a second draw
        checks.check_same_bits(checks.run_partition(partition, planner.joint), checks.run_joint(planner.joint))


def deep(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(30):
        x = torch.tanh(x @ w)
    return x.sum()


def test_bytes_are_those_of_the_sizes_at_hand_and_fractions_do_not_depend_on_them():
    def plan_of(rows: int, budget: float | int) -> Candidate:
        settings = replace(EAGER, strict=False, budget=budget)
        joint = graphs.joint_of(deep, graphs.leaf(rows, 64), graphs.leaf(64, 64), dynamic=True)
        from remat.partitioner import decide

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RematWarning)
            return decide(joint, settings).chosen

    small, large = plan_of(256, 0.6), plan_of(512, 0.6)
    assert [n.name for n in small.plan.saved] == [n.name for n in large.plan.saved]
    allowed = 30 * 256 * 64 * 4 // 2
    assert len(plan_of(512, allowed).plan.recomputed) > len(plan_of(256, allowed).plan.recomputed)
