"""Search for sequences within a memory budget: repair by evicting, improve by keeping, and the whole frontier.

The frontier is made once, whatever the budget: from plans of other solvers the search goes down in steps of the
budget, at each step evicting until the sequence fits and then keeping what fits again. Every sequence met is a point;
the points that no other beats in both peak and cost are the frontier. A budget takes the cheapest point below it, so
a smaller budget never leads to a higher peak or to less recomputation.

All limits count steps, not seconds: the same problem gives the same frontier on every machine.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.problem import Problem
from remat.schedule import EARLIER_STEPS, Eviction, Hoist, Schedule

# One step down the budgets, as a share of the last.
STEP_DOWN: Final = 0.02


@dataclass(frozen=True, eq=False)
class Point:
    """A sequence with its peak in bytes and its recompute cost."""

    peak: int
    cost: int
    sequence: tuple[int, ...]
    origin: str


class Frontier:
    """Points that no other beats in peak and cost, by growing peak."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, point: Point) -> bool:
        """Take a point in; False if another is at least as good."""
        at = bisect_right(self.points, point.peak, key=lambda known: known.peak)
        if at and self.points[at - 1].cost <= point.cost:
            return False
        if at and self.points[at - 1].peak == point.peak:
            at -= 1
        end = at
        while end < len(self.points) and self.points[end].cost >= point.cost:
            end += 1
        self.points[at:end] = [point]
        return True

    def within(self, budget: int) -> Point | None:
        """The cheapest point of at most this peak."""
        at = bisect_right(self.points, budget, key=lambda known: known.peak)
        return self.points[at - 1] if at else None


class Repair:
    """Evict until a schedule fits a budget, most relief for the cost first."""

    def __init__(self, schedule: Schedule, budget: int) -> None:
        self.schedule, self.budget = schedule, budget
        # Of unknown price yet: what it would cost to run everything again to be rid of all the excess.
        excess = int(np.maximum(schedule.alive - budget, 0).sum())
        self.rate = schedule.problem.baseline_cost / max(excess, 1)
        self.moves = 0

    def run(self) -> bool:
        """Whether the schedule fits now."""
        while self.schedule.peak > self.budget:
            at = int(self.schedule.alive.argmax())
            if not self._relieve(int(self.schedule.order[at])) and not self._relocate():
                return False
        return True

    def _relocate(self) -> bool:
        """Where evicting does not help: run a second run near the peak earlier, where there is more room for it.

        The derivative of a GELU takes four temporaries; made before the incoming gradient is, it takes their room
        while there is some. Tried out one by one, since a run takes along what it needs.
        """
        schedule = self.schedule
        at = int(schedule.alive.argmax())
        sequence, best, best_excess = schedule.sequence(), None, _excess(schedule, self.budget)
        for event, before in self._relocations(at):
            trial = Schedule(schedule.problem, sequence)
            # Events of a fresh schedule are its positions.
            if not trial.rerun_earlier(int(schedule.position[event]), int(schedule.position[before]), self.budget):
                continue
            excess = _excess(trial, self.budget)
            if excess < best_excess:
                best, best_excess = trial, excess
        if best is None:
            return False
        self.schedule = best
        self.moves += 1
        return True

    def _relocations(self, at: int) -> list[tuple[int, int]]:
        """Second runs at or soon after the peak, each with the steps before the peak to run it at."""
        schedule, problem = self.schedule, self.schedule.problem
        here = int(schedule.order[at])
        events = {here, *schedule.source[here].values()}
        for event in (here, *schedule.source[here].values()):
            events.update(reader for readers in schedule.uses[event].values() for reader in readers[:1])
        found = []
        for event in sorted(events):
            if schedule.operator[event] in problem.once or schedule.runs[schedule.operator[event]] < 2:
                continue
            places = set()
            for reach in EARLIER_STEPS:
                low = max(0, min(at, int(schedule.position[event])) - reach)
                window = schedule.alive[low : min(at, int(schedule.position[event]))]
                if len(window):
                    places.add(low + int(window.argmin()))
            found += [(event, int(schedule.order[place])) for place in sorted(places)]
        return found

    def _relieve(self, event: int) -> bool:
        """Evict at one step until it fits."""
        schedule, moved = self.schedule, False
        while True:
            at = int(schedule.position[event])
            if schedule.alive[at] <= self.budget:
                return True
            before = int(schedule.alive[at])
            best = self._best(at)
            if best is None:
                return False
            self.moves += 1
            if isinstance(best, Hoist):
                schedule.hoist(best)
                continue
            schedule.evict(best)
            self.rate = max(best.cost, 1) / best.relief
            if int(schedule.alive[int(schedule.position[event])]) >= before:
                return False

    def _best(self, at: int) -> Eviction | Hoist | None:
        schedule, budget = self.schedule, self.budget
        over = np.concatenate([[0], np.cumsum(schedule.alive > budget)])
        problem = schedule.problem
        candidates = []
        for gap, start, end in schedule.gaps_at(at):
            steps = int(over[end + 1] - over[start])
            bound = steps * problem.size[gap.value] / (problem.cost[problem.producer[gap.value]] + 1)
            candidates.append((bound, gap, start, end))
            hoist = schedule.evaluate_hoist(gap, start, end, budget) if end + 1 < len(schedule.order) else None
            if hoist is not None:
                return hoist  # it costs nothing
        candidates.sort(key=lambda item: -item[0])
        best: Eviction | None = None
        ratio = 0.0
        for bound, gap, start, end in candidates:
            if bound <= ratio:
                break
            limit = bound * (problem.cost[problem.producer[gap.value]] + 1) / ratio if ratio else math.inf
            found = schedule.evaluate(gap, start, end, budget, self.rate, limit)
            if found is not None and found.relief / (found.cost + 1) > ratio:
                best, ratio = found, found.relief / (found.cost + 1)
        return best


def _excess(schedule: Schedule, budget: int) -> int:
    """Bytes x steps above the budget."""
    return int(np.maximum(schedule.alive - budget, 0).sum())


def keep_what_fits(schedule: Schedule, budget: int) -> int:
    """Let second runs fall away where their values fit, dearest for the room they take first; how many did."""
    problem = schedule.problem
    ranked = []
    for event in schedule.second_runs():
        operator, at = schedule.operator[event], int(schedule.position[event])
        room = 1
        for value in schedule.uses[event]:
            older = schedule.newest(value, at)
            if older is not None and schedule.uses[event][value]:
                room += problem.size[value] * max(0, at - schedule.last(older, value))
        ranked.append((problem.cost[operator] / room, -at, event))
    ranked.sort(reverse=True)
    kept = 0
    for _, _, event in ranked:
        at = int(schedule.position[event])
        if at >= len(schedule.order) or int(schedule.order[at]) != event:
            continue
        if schedule.may_keep(event, budget):
            schedule.keep(event)
            kept += 1
    return kept


def descend(problem: Problem, starts: Sequence[Point], frontier: Frontier, floor: int, step: float = STEP_DOWN) -> None:
    """Go down from the highest start to the floor, adding what is found to the frontier."""
    for start in starts:
        frontier.add(start)
    budget = max(start.peak for start in starts)
    current: Schedule | None = None
    while budget > floor:
        budget = max(floor, int(budget * (1 - step)))
        results = []
        known = frontier.within(int(budget / (1 - step)))
        candidates = [Schedule(problem, known.sequence)] if known is not None else []
        for schedule in candidates:
            repair = Repair(schedule, budget)
            if repair.run():
                schedule = repair.schedule
                while keep_what_fits(schedule, budget):
                    pass
                results.append(schedule)
        if not results:
            return
        best = min(results, key=lambda schedule: schedule.cost)
        frontier.add(Point(best.peak, best.cost, best.sequence(), "search"))
