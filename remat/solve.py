"""The planner for plain graphs: a cheap sequence of a graph's nodes that stays within a memory budget.

Every round anneals the order for little memory, evicts until it fits, keeps what fits, and anneals order and
recomputation together. The first takes the given order as it is. What rounds have found is then annealed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from remat.anneal import Annealing, Cooling
from remat.errors import BudgetUnreachable
from remat.ordering import order_within
from remat.problem import Problem, single_valued
from remat.schedule import Schedule
from remat.search import Repair, keep_what_fits

# Temperatures that the rounds start their orders from, in mean sizes: hot ones change the order as a whole.
HEATS: Final = (5.0, 300.0, 30.0)
# Steps of each annealing, for orders and for schedules as a whole: so many for each node, to a limit.
STEPS_PER_NODE: Final = 500
MOST_STEPS: Final = 40_000
# Short ones after the rounds, so many for each, from the cheapest.
AGAINS: Final = 3
AGAIN: Final = Cooling(heats=(0.1, 0.004), rates=(1.0, 30.0), quench=30.0)


def schedule(
    size: Sequence[int],
    cost: Sequence[int],
    edges: Iterable[tuple[int, int]],
    order: Sequence[int],
    budget: int,
    *,
    effort: int = 2,
) -> list[int]:
    """Nodes in an order that respects the edges, each as often as needed, within the budget and as cheap as found.

    A node's result takes its size from the step that computes it until the last that reads it. `order` is any legal
    order of all nodes. `effort` counts rounds; the same arguments give the same sequence on every machine.
    Raises BudgetUnreachable if nothing found fits, ValueError if the order is no legal order.
    """
    problem = single_valued(size, cost, edges, order)
    why = problem.why_illegal(problem.order)
    if why is not None or len(order) != len(size):
        raise ValueError(f"not an order of all nodes: {why or 'a node runs twice'}")
    return list(_Rounds(problem, budget).run(effort))


class _Rounds:
    """The cheapest sequence within the budget over all rounds, and the smallest peak of any."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem, self.budget = problem, budget
        self.steps = min(STEPS_PER_NODE * len(problem.cost), MOST_STEPS)
        self.best: tuple[int, ...] | None = None
        self.cost = 0
        self.smallest_peak = 0

    def run(self, effort: int) -> tuple[int, ...]:
        problem = self.problem
        if problem.order:
            self.smallest_peak = problem.peak(problem.order)
            self._offer(problem.order)
        else:
            self.best = ()
        for number in range(effort + 1):
            if not self._is_done():
                self._round(number)
        for number in range(AGAINS * effort):
            if not self._is_done():
                self._again(number)
        if self.best is None:
            raise BudgetUnreachable(f"nothing within {self.budget} bytes: the smallest peak is {self.smallest_peak}")
        return self.best

    def _is_done(self) -> bool:
        return self.best is not None and not self.cost

    def _offer(self, sequence: tuple[int, ...]) -> None:
        peak, cost = self.problem.peak(sequence), self.problem.recompute_cost(sequence)
        self.smallest_peak = min(self.smallest_peak, peak)
        if peak <= self.budget and (self.best is None or cost < self.cost):
            self.best, self.cost = sequence, cost

    def _round(self, number: int) -> None:
        """Order, evict, keep, anneal; the round of number 0 takes the order as it is."""
        sequence, excess = self.problem.order, _excess(self.problem, self.problem.order, self.budget)
        if number:
            heat = HEATS[(number - 1) % len(HEATS)]
            sequence, excess = order_within(self.problem, sequence, self.budget, self.steps, heat, number)
            self._offer(sequence)
            if not excess:
                return
        sequence, repaired = self._repair(sequence)
        cost = max(self.problem.recompute_cost(sequence), self.cost if not repaired else 1, 1)
        self._anneal(sequence, cost / excess, self.steps if number else self.steps // 2, Cooling(), number)

    def _again(self, number: int) -> None:
        """Anneal the cheapest; where there is none, tell by the baseline's cost."""
        sequence = self.best or self.problem.order
        excess = _excess(self.problem, self.problem.order, self.budget)
        cost = self.cost if self.best else self.problem.baseline_cost
        self._anneal(sequence, max(cost, 1) / excess, self.steps // 2, AGAIN, 1000 + number)

    def _repair(self, sequence: Sequence[int]) -> tuple[tuple[int, ...], bool]:
        repair = Repair(Schedule(self.problem, sequence), self.budget)
        fits = repair.run()
        while fits and keep_what_fits(repair.schedule, self.budget):
            pass
        found = repair.schedule.sequence()
        self._offer(found)
        return found, fits

    def _anneal(self, sequence: Sequence[int], rate: float, steps: int, cooling: Cooling, seed: int) -> None:
        annealing = Annealing(self.problem, sequence, self.budget, rate, seed)
        annealing.run(steps, cooling)
        if annealing.best is not None:
            repaired = Schedule(self.problem, annealing.best[1])
            while keep_what_fits(repaired, self.budget):
                pass
            self._offer(repaired.sequence())
        self._repair(annealing.schedule.sequence())


def _excess(problem: Problem, sequence: Sequence[int], budget: int) -> int:
    """Bytes x steps above the budget."""
    return int(np.maximum(np.array(problem.profile(sequence), dtype=np.int64) - budget, 0).sum())
