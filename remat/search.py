"""Search for sequences within a memory budget: repair by evicting, improve by keeping, and the whole frontier.

The frontier is made once, whatever the budget: from plans of other solvers the search goes down in steps of the
budget, at each step evicting until the sequence fits and then keeping what fits again. Every sequence met is a point;
the points that no other beats in both peak and cost are the frontier. A budget takes the cheapest point below it, so
a smaller budget never leads to a higher peak or to less recomputation.

All limits count steps, not seconds: the same problem gives the same frontier on every machine.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.chain import ChainPlanner, find_stages
from remat.problem import Problem
from remat.schedule import EARLIER_STEPS, Eviction, Gap, Schedule

# Ratio of the memory of neighbouring chain schedules that the search starts from.
CHAIN_STEP: Final = 0.9
# Shares of the unconstrained peak that the tables of chain schedules cover: the slots of one table are too coarse for
# the smallest budgets (of 1,024 equal layers a slot of the whole holds four).
CHAIN_SHARES: Final = (1.0, 0.25, 0.0625)
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
        """Evict at one step until it fits. Ratios are looked up again only where they would win (lazy greedy)."""
        schedule = self.schedule
        while schedule.alive[schedule.position[event]] > self.budget:
            before = int(schedule.alive[schedule.position[event]])
            if not self._hoist(event):
                self._evict_in_turn(event)
            if int(schedule.alive[schedule.position[event]]) >= before:
                return False
        return True

    def _hoist(self, event: int) -> bool:
        schedule, at = self.schedule, int(self.schedule.position[event])
        for gap in schedule.gaps_at(at):
            span = schedule.span(gap)
            move = schedule.evaluate_hoist(gap, *span, self.budget) if span else None
            if move is not None:
                schedule.hoist(move)  # it costs nothing
                self.moves += 1
                return True
        return False

    def _evict_in_turn(self, event: int) -> None:
        """Evict what is alive at one step, best ratio of relief to cost first, until it fits or nothing helps."""
        schedule, problem = self.schedule, self.schedule.problem
        at = int(schedule.position[event])
        over = np.concatenate([[0], np.cumsum(schedule.alive > self.budget)])
        heap: list[tuple[float, int, Gap, Eviction | None, int]] = []
        for number, gap in enumerate(schedule.gaps_at(at)):
            span = schedule.span(gap)
            assert span is not None
            steps = int(over[span[1] + 1] - over[span[0]])
            most = steps * problem.size[gap.value] / (problem.cost[problem.producer[gap.value]] + 1)
            heap.append((-most, number, gap, None, -1))
        heapq.heapify(heap)
        moves = 0
        while heap and schedule.alive[schedule.position[event]] > self.budget:
            ratio, number, gap, found, known_at = heapq.heappop(heap)
            if found is not None and known_at == moves:
                schedule.evict(found)
                self.rate = max(found.cost, 1) / found.relief
                moves += 1
                continue
            span = schedule.span(gap)
            if span is None or not span[0] <= schedule.position[event] <= span[1]:
                continue
            found = schedule.evaluate(gap, *span, self.budget, self.rate)
            if found is not None:
                heapq.heappush(heap, (-found.relief / (found.cost + 1), number, gap, found, moves))
        self.moves += moves


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


def make_frontier(problem: Problem, seeds: Sequence[tuple[tuple[int, ...], str]]) -> Frontier:
    """The frontier of a training step, from legal sequences of other solvers, each with its name."""
    starts = [Point(problem.peak(s), problem.recompute_cost(s), s, origin) for s, origin in seeds]
    frontier = Frontier()
    descend(problem, [*starts, *_chain_points(problem, starts)], frontier, problem.lower_bound_bytes())
    return frontier


def _chain_points(problem: Problem, starts: Sequence[Point]) -> list[Point]:
    """Nested schedules for a ladder of budgets, with what the starts save as options."""
    kept = [_saved(problem, start.sequence) for start in starts]
    stages = find_stages(problem)
    memory, found = max(start.peak for start in starts), []
    for share in CHAIN_SHARES:
        planner = ChainPlanner(stages, kept, int(memory * share))
        costs, last = planner.costs(), -1
        slots = float(planner.slots)
        while slots >= 1 and np.isfinite(costs[int(slots)]):
            if int(slots) != last:
                last = int(slots)
                sequence = planner.sequence(last)
                found.append(Point(problem.peak(sequence), problem.recompute_cost(sequence), sequence, "chain"))
            slots *= CHAIN_STEP
    return found


def _saved(problem: Problem, sequence: Sequence[int]) -> frozenset[int]:
    """The values alive while the boundary runs."""
    at = list(sequence).index(problem.boundary)
    return frozenset(value for value, born, last in problem.lives(sequence) if born < at < last)


def descend(problem: Problem, starts: Sequence[Point], frontier: Frontier, floor: int, step: float = STEP_DOWN) -> None:
    """Go down from the highest start to the floor, adding what is found to the frontier."""
    for start in starts:
        frontier.add(start)
    budget = max(start.peak for start in starts)
    schedule: Schedule | None = None
    while budget > floor:
        above = budget
        budget = max(floor, int(budget * (1 - step)))
        known = frontier.within(above)
        if known is not None and (schedule is None or known.cost < schedule.cost):
            schedule = Schedule(problem, known.sequence)
        assert schedule is not None
        repair = Repair(schedule, budget)
        if not repair.run():
            known = frontier.within(budget)
            if known is None:
                return
            schedule = Schedule(problem, known.sequence)
        else:
            schedule = repair.schedule
        while keep_what_fits(schedule, budget):
            pass
        frontier.add(Point(schedule.peak, schedule.cost, schedule.sequence(), "search"))
