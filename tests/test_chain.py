"""Chains: the published optimum on equal layers, and sequences that are legal and fit on any problem."""

from __future__ import annotations

import numpy as np
import pytest

from remat.chain import ChainPlanner, find_stages
from remat.search import make_frontier
from tests.oracle import chain_problem, random_problem
from tests.test_oracle import revolve


@pytest.mark.parametrize("layers", range(2, 65))
def test_the_forward_steps_are_revolves(layers: int):
    """Two of the values alive are gradients; of the steps that Revolve counts the first pass has all but one."""
    problem = chain_problem(layers)
    planner = ChainPlanner(find_stages(problem), [frozenset(range(layers))], problem.peak(problem.order))
    assert planner.unit == 1
    for states in range(1, min(8, layers - 1) + 1):
        sequence = planner.sequence(states + 2)
        assert problem.why_illegal(sequence) is None
        assert problem.peak(sequence) <= states + 2
        assert problem.recompute_cost(sequence) == revolve(layers, states) - (layers - 1)


@pytest.mark.parametrize("layers", [16, 64])
def test_the_frontier_of_a_chain_is_revolves(layers: int):
    problem = chain_problem(layers)
    frontier = make_frontier(problem, [(problem.order, "baseline")])
    for states in range(1, 9):
        point = frontier.within(states + 2)
        assert point is not None
        assert point.cost == revolve(layers, states) - (layers - 1)


def test_with_one_more_forward_the_peak_grows_with_the_square_root():
    peaks = {}
    for layers in (16, 64, 256):
        problem = chain_problem(layers)
        frontier = make_frontier(problem, [(problem.order, "baseline")])
        peaks[layers] = min(point.peak for point in frontier.points if point.cost <= layers)
    slope = np.polyfit(np.log(list(peaks)), np.log(list(peaks.values())), 1)[0]
    assert slope <= 0.55
    assert all(peak <= 2.2 * layers**0.5 for layers, peak in peaks.items())


@pytest.mark.parametrize("seed", range(20))
def test_sequences_of_any_problem_are_legal(seed: int):
    problem = random_problem(seed, 6)
    saved = [frozenset(range(len(problem.size))), frozenset[int]()]
    planner = ChainPlanner(find_stages(problem), saved, problem.peak(problem.order), slots=64)
    costs = planner.costs()
    assert np.isfinite(costs[-1])
    for slots, cost in enumerate(costs):
        if np.isfinite(cost):
            assert problem.why_illegal(planner.sequence(slots)) is None
        else:
            with pytest.raises(ValueError, match="no schedule of this chain fits"):
                planner.sequence(slots)


def test_at_most_as_many_stages_as_asked_for():
    problem = chain_problem(100)
    for most in (1, 2, 7, 40, 200):
        stages = find_stages(problem, most)
        assert stages.count == min(most, 100)
        assert [o for k in range(stages.count) for o in stages.operators(k, k + 1)] == list(range(100))
        widths = np.diff([-1, *stages.ends])
        assert widths.max() <= 2 * widths.min() + 2, "stages of equal layers are of like size"
