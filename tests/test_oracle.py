"""The oracles against each other, against plain enumeration, and against the published optimum of a chain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from remat.problem import Problem
from tests.oracle import (
    Optimum,
    chain_problem,
    exhaustive_optimum,
    multi_level_optimum,
    random_problem,
    single_level_optimum,
)

# What the enumeration adds to one run of everything: 2 already gives versions of versions, 3 takes minutes.
EXTRA_STEPS = 2


def cost_of(optimum: Optimum) -> float:
    """Its cost, infinite where nothing fits."""
    assert optimum.proven
    return math.inf if optimum.cost is None else optimum.cost


def check(problem: Problem, budget: int, optimum: Optimum) -> None:
    """What an optimum says of its sequence is so."""
    if optimum.cost is None:
        assert optimum == Optimum(None, (), True, None)
        return
    assert problem.why_illegal(optimum.sequence) is None
    assert problem.peak(optimum.sequence) <= budget
    assert problem.recompute_cost(optimum.sequence) == optimum.cost == optimum.bound


def budgets(problem: Problem, steps: int = 5) -> list[int]:
    """From just below what can fit to the baseline's peak."""
    low, high = problem.lower_bound_bytes(), problem.peak(problem.order)
    return sorted({low - 1, *(low + (high - low) * step // steps for step in range(steps + 1))})


def all_sequences(problem: Problem, length: int, begun: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every legal sequence of at most so many steps, from the definition alone."""
    if len(set(begun)) == len(problem.reads) and problem.why_illegal(begun) is None:
        yield begun
    if len(begun) < length:
        made = {value for operator in begun for value in problem.writes[operator]}
        for operator, reads in enumerate(problem.reads):
            if made.issuperset(reads) and not (operator in problem.once and operator in begun):
                yield from all_sequences(problem, length, (*begun, operator))


def variants(seed: int) -> list[Problem]:
    """A tiny training step, one with more held values (some of them unsavable), and one that is no training step."""
    problem = random_problem(seed, layers=2 + seed % 2)
    held = problem.held | set(range(seed % 3, len(problem.size), 3))
    once = frozenset(operator for operator in problem.once if operator % 2)
    plain = replace(problem, boundary=None, once=once, unsavable=frozenset())
    return [problem, replace(problem, held=held), plain]


@pytest.mark.parametrize("seed", range(24))
def test_search_finds_what_enumeration_finds(seed: int) -> None:
    for problem in variants(seed):
        if len(problem.reads) + len(set(range(len(problem.reads))) - problem.once) > 11:
            continue  # more sequences than seconds allow
        length = len(problem.reads) + EXTRA_STEPS
        found: dict[int, int] = {}
        for sequence in all_sequences(problem, length):
            peak = problem.peak(sequence)
            found[peak] = min(problem.recompute_cost(sequence), found.get(peak, problem.baseline_cost * length))
        for budget in (min(found, default=1) - 1, *found):
            optimum = exhaustive_optimum(problem, budget)
            check(problem, budget, optimum)
            enumerated = min((cost for peak, cost in found.items() if peak <= budget), default=math.inf)
            assert cost_of(optimum) <= enumerated
            assert cost_of(optimum) == enumerated or len(optimum.sequence) > length
            assert cost_of(optimum) <= cost_of(multi_level_optimum(problem, budget))


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 6, 7])
def test_programs_are_never_below_the_search(layers: int) -> None:
    """Equal but where another order of first runs, or a second run within a stage, is of use.

    That was so at 2 of 255 budgets of 72 such problems.
    """
    for seed in range(8):
        problem = random_problem(seed, layers)
        for budget in budgets(problem):
            exact, multi, single = (
                solve(problem, budget) for solve in (exhaustive_optimum, multi_level_optimum, single_level_optimum)
            )
            for optimum in (exact, multi, single):
                check(problem, budget, optimum)
            assert cost_of(exact) <= cost_of(multi) <= cost_of(single)


def revolve(layers: int, states: int) -> int:
    """Forward steps that reversing a chain takes with room for so many states (Griewank & Walther 2000, section 2)."""
    rounds = next(rounds for rounds in range(layers + 1) if math.comb(states + rounds, states) >= layers)
    return rounds * layers - math.comb(states + rounds, states + 1)


@pytest.mark.parametrize("layers", [2, 3, 5, 8, 10])
def test_chains_have_the_published_optimum(layers: int) -> None:
    """Two of the values alive are gradients; the first pass takes all steps but the last."""
    problem = chain_problem(layers)
    assert exhaustive_optimum(problem, 2).cost is None
    for budget in range(3, layers + 3):
        published = revolve(layers, budget - 2) - (layers - 1)
        for solve in (exhaustive_optimum, multi_level_optimum):
            optimum = solve(problem, budget)
            check(problem, budget, optimum)
            assert optimum.cost == published


def test_a_chain_by_hand() -> None:
    """Six layers: with one value besides the gradients all is run from the start each time, 4 + 3 + 2 + 1 steps.

    At most twice, five bytes keep values 1 and 3 beside the one at hand; three cannot do.
    """
    problem = chain_problem(6)
    assert [multi_level_optimum(problem, budget).cost for budget in range(2, 8)] == [None, 10, 3, 2, 1, 0]
    assert [single_level_optimum(problem, budget).cost for budget in range(2, 8)] == [None, None, 3, 2, 1, 0]


def test_what_is_not_proven_says_so() -> None:
    problem = random_problem(0, 30)
    budget = problem.lower_bound_bytes() + 10
    optimum = multi_level_optimum(problem, budget, seconds=0.2)
    assert not optimum.proven
    assert optimum.bound is not None
    assert optimum.cost is None or optimum.cost > optimum.bound


def test_bytes_that_solvers_round() -> None:
    """Gigabytes and single bytes in one problem: a budget one byte short is another budget."""
    problem = chain_problem(6)
    problem = replace(problem, size=tuple(3 if value == 3 else 7 * 2**30 + value for value in range(len(problem.size))))
    fits = [exhaustive_optimum(problem, gigabytes * 2**30) for gigabytes in range(20, 60)]
    peaks = {problem.peak(optimum.sequence) for optimum in fits if optimum.cost is not None}
    assert len(peaks) > 2
    for budget in sorted({*peaks, *(peak - 1 for peak in peaks)}):
        optimum = multi_level_optimum(problem, budget)
        check(problem, budget, optimum)
        assert optimum.cost == exhaustive_optimum(problem, budget).cost


def test_random_problems_are_problems() -> None:
    """The baseline is legal but for what may not be saved, and every kind of trait occurs."""
    problems = [random_problem(seed, 5 + seed % 5) for seed in range(40)]
    for problem in problems:
        assert replace(problem, unsavable=frozenset()).why_illegal(problem.order) is None
        assert problem.boundary in problem.once
    assert any(problem.unsavable for problem in problems)
    assert any(len(values) > 1 for problem in problems for values in problem.writes)
    assert any(set(problem.order[:5]) & problem.once for problem in problems)
