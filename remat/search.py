"""Search for sequences within a memory budget: repair by evicting, improve by keeping, and the whole frontier.

The frontier is made once, whatever the budget: from plans of other solvers the search goes down in steps of the
budget, at each step evicting until the sequence fits and then keeping what fits again. Every sequence met is a point;
the points that no other beats in both peak and cost are the frontier. A budget takes the cheapest point below it, so
a smaller budget never leads to a higher peak or to less recomputation.

All limits count steps, not seconds: the same problem gives the same frontier on every machine.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.chain import MAX_STAGES, ChainPlanner, find_stages
from remat.errors import UnsupportedGraph
from remat.problem import Problem
from remat.schedule import EARLIER_STEPS, Eviction, Gap, Schedule

# In sequences longer than this, what other evictions would bring is taken to have shrunk with the excess since they
# were looked at, instead of looking again: on 60 layers of GPT-2 (9,315 nodes) a decision took 16 s instead of 30,
# while on 12 layers it took 0.5 s less and the frontier's area grew by a tenth.
EXACT_STEPS: Final = 2500
# Ratio of the memory of neighbouring chain schedules that the search starts from.
CHAIN_STEP: Final = 0.9
FINE_CHAIN_STEP: Final = 0.95  # where there are many stages
# Shares of the unconstrained peak that the tables of chain schedules cover: the slots of one table are too coarse for
# the smallest budgets (of 1,024 equal layers a slot of the whole holds four).
CHAIN_SHARES: Final = (1.0, 0.25, 0.0625)
# Work on better choices at each step of the budget, in steps of sequences tried: one of 30 steps gets 40 tries. On
# 214 cases of random graphs of 6 to 20 operators the mean gap to the optimum fell from 0.48% of a step's cost to
# 0.013%, the worst from 19% to 2.8%. Sequences too long for POLISH_LEAST tries get none: one try brought nothing on
# real models.
POLISH_STEPS: Final = 1200
POLISH_LEAST: Final = 8
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
        self.rate = schedule.problem.baseline_cost / max(_excess(schedule, budget), 1)

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
            if not self._hoist(event) and not self._evict_in_turn(event, self.schedule.known_cost):
                self._evict_in_turn(event, {})
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
                return True
        return False

    def _evict_in_turn(self, event: int, known_cost: Mapping[Gap, float]) -> bool:
        """Evict what is alive at one step, best ratio of relief to cost first; whether it fits then.

        Candidates are ordered by what they cost when they were last looked at, at least by their own operator's cost,
        and looked at again when their turn comes: on the 60-layer GPT-2 that saved nine tenths of the evaluations.
        """
        schedule, problem = self.schedule, self.schedule.problem
        at = int(schedule.position[event])
        over = np.concatenate([[0], np.cumsum(schedule.alive > self.budget)])
        heap: list[tuple[float, int, Eviction | None, int]] = []  # ratio, place in `gaps`, when it was evaluated
        gaps, most = schedule.gaps_at(at), []
        for number, gap in enumerate(gaps):
            span = schedule.span(gap)
            assert span is not None
            most.append(int(over[span[1] + 1] - over[span[0]]) * problem.size[gap.value])
            cost = max(problem.cost[problem.producer[gap.value]], known_cost.get(gap, 0))
            if cost < math.inf:
                heap.append((-most[-1] / (cost + 1), number, None, -1))
        heapq.heapify(heap)
        excess = [_excess(schedule, self.budget)]  # after each eviction: as many as there have been, and one

        def evict(found: Eviction) -> None:
            schedule.evict(found)
            self.rate = max(found.cost, 1) / found.relief
            excess.append(_excess(schedule, self.budget))

        while heap and schedule.alive[schedule.position[event]] > self.budget:
            ratio, number, found, known_at = heapq.heappop(heap)
            if found is not None and known_at == len(excess) - 1:
                evict(found)
                continue
            span = schedule.span(gaps[number])
            if span is None or not span[0] <= schedule.position[event] <= span[1]:
                continue
            # At twice the cost that would still make it the next best, the bound that comes back is below that one;
            # where the excess has grown meanwhile it may not be, and is then taken to be half of the last.
            limit = 2 * most[number] / -heap[0][0] if heap and heap[0][0] else math.inf
            result = schedule.evaluate(gaps[number], *span, self.budget, self.rate, limit)
            schedule.note_cost(gaps[number], result, most[number])
            if isinstance(result, Eviction):
                now = result.relief / (result.cost + 1)
                shrunk = excess[-1] / excess[max(heap[0][3], 0)] if heap and len(schedule.order) > EXACT_STEPS else 1.0
                if heap and now < -heap[0][0] * shrunk:
                    heapq.heappush(heap, (-now, number, result, len(excess) - 1))
                else:
                    evict(result)
            elif result:
                heapq.heappush(heap, (max(-result, ratio / 2), number, None, -1))
        return bool(schedule.alive[schedule.position[event]] <= self.budget)


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
    starts += _chain_points(problem, starts)
    legal = [start for start in starts if problem.why_illegal(start.sequence) is None]
    if not legal:
        raise UnsupportedGraph(f"no sequence to start from: {problem.why_illegal(problem.order)}")
    frontier = Frontier()
    descend(problem, legal, frontier, problem.lower_bound_bytes())
    return frontier


def _chain_points(problem: Problem, starts: Sequence[Point]) -> list[Point]:
    """Nested schedules for a ladder of budgets, with what the starts save as options."""
    kept = [_saved(problem, start.sequence) for start in starts]
    stages = find_stages(problem)
    memory, found = max((start.peak for start in starts), default=problem.peak(problem.order)), []
    for share in CHAIN_SHARES:
        planner = ChainPlanner(stages, kept, int(memory * share))
        costs, last = planner.costs(), -1
        slots, ratio = float(planner.slots), CHAIN_STEP if stages.count <= MAX_STAGES else FINE_CHAIN_STEP
        while slots >= 1 and np.isfinite(costs[int(slots)]):
            if int(slots) != last:
                last = int(slots)
                sequence = planner.sequence(last)
                found.append(Point(problem.peak(sequence), problem.recompute_cost(sequence), sequence, "chain"))
            slots *= ratio
    return found


def _saved(problem: Problem, sequence: Sequence[int]) -> frozenset[int]:
    """The values alive while the boundary runs."""
    assert problem.boundary is not None
    at = sequence.index(problem.boundary)
    return frozenset(value for value, born, last in problem.lives(sequence) if born < at < last)


def descend(problem: Problem, starts: Sequence[Point], frontier: Frontier, floor: int, step: float = STEP_DOWN) -> None:
    """Go down from the highest start to the floor, adding what is found to the frontier."""
    for start in starts:
        frontier.add(start)
    budget = max((start.peak for start in starts), default=0)
    schedule: Schedule | None = None
    while budget > floor:
        above = budget
        budget = max(floor, int(budget * (1 - step)))
        known = frontier.within(above)
        if known is not None and (schedule is None or known.cost < schedule.cost):
            schedule = Schedule(problem, known.sequence)
        assert schedule is not None
        known_sequence = schedule.sequence()
        found = _fitted(schedule, budget)
        if found is None:
            schedule = Schedule(problem, known_sequence)
        found = _polished(problem, schedule, found, budget)
        if found is None:
            known = frontier.within(budget)
            if known is None:
                return
            found = Schedule(problem, known.sequence)
        schedule = found
        frontier.add(Point(schedule.peak, schedule.cost, schedule.sequence(), "search"))
        budget = min(budget, schedule.peak)


def _fitted(schedule: Schedule, budget: int) -> Schedule | None:
    """Evict until it fits, then keep what fits again; None where evicting does not help."""
    repair = Repair(schedule, budget)
    if not repair.run():
        return None
    if keep_what_fits(repair.schedule, budget):
        keep_what_fits(repair.schedule, budget)  # what fell away has made room
    return repair.schedule


def _polished(problem: Problem, schedule: Schedule, fitted: Schedule | None, budget: int) -> Schedule | None:
    """Change something first, whatever it brings by itself, then fit again: better where greedy choices were wrong.

    Every change in turn, on from each improvement (less excess where nothing fits yet, then less cost); then two at
    once, drawn at random.
    """
    tries = POLISH_STEPS // len(schedule.order)
    if tries < POLISH_LEAST:
        return fitted
    best = fitted or schedule
    rating = (_excess(best, budget), best.cost)
    generator = random.Random(0)
    changes = _changes(problem, best.sequence(), budget)
    while tries > 0:
        tries -= 1
        trial = next(changes, None)
        if trial is None:
            trial = _changed_twice(problem, best.sequence(), budget, generator)
            if trial is None:
                break
        found = _fitted(trial, budget) or trial
        if (_excess(found, budget), found.cost) < rating:
            best, rating = found, (_excess(found, budget), found.cost)
            changes = _changes(problem, best.sequence(), budget)
    return None if rating[0] else best


def _changes(problem: Problem, sequence: Sequence[int], budget: int) -> Iterator[Schedule]:
    return itertools.chain(_moved(problem, sequence), _evicted(problem, sequence, budget))


def _changed_twice(
    problem: Problem, sequence: Sequence[int], budget: int, generator: random.Random
) -> Schedule | None:
    for _ in range(2):
        choices = list(_changes(problem, sequence, budget))
        if not choices:
            return None
        chosen = generator.choice(choices)
        sequence = chosen.sequence()
    return chosen


def _evicted(problem: Problem, sequence: Sequence[int], budget: int) -> Iterator[Schedule]:
    """The sequence with one value evicted in one gap, those that take most room first."""
    for gap in _all_gaps(Schedule(problem, sequence)):
        trial = Schedule(problem, sequence)
        forced = trial.force(gap, budget)
        if forced is not None:
            trial.evict(forced)
            yield trial


def _moved(problem: Problem, sequence: Sequence[int]) -> Iterator[Schedule]:
    """The sequence with operators that the forward does not need, such as masks, run earlier or later.

    One at a time to right after its last argument or right before its first reader; or all that still read a value, to
    right after one of its uses.
    """
    movable = [o for o in problem.order if o not in problem.once and o not in problem.before_boundary]
    place = {operator: step for step, operator in enumerate(sequence)}  # of its last run
    first = {operator: step for step, operator in reversed(list(enumerate(sequence)))}
    for operator in movable:
        made = max((first[problem.producer[value]] for value in problem.reads[operator]), default=-1)
        if made + 1 < place[operator]:
            rest = [o for o in sequence[made + 1 :] if o != operator]
            yield from _legal(problem, [*sequence[: made + 1], operator], rest)
        readers = {user for value in problem.writes[operator] for user in problem.readers[value]}
        steps = [step for step, user in enumerate(sequence) if user in readers and step > place[operator]]
        if steps:
            before = [o for o in sequence[: steps[0]] if o != operator]
            yield from _legal(problem, [*before, operator], sequence[steps[0] :])
        else:  # nobody reads it: it may stand anywhere
            rest = [o for o in sequence if o != operator]
            for step in range(made + 1, len(rest) + 1):
                yield from _legal(problem, [*rest[:step], operator], rest[step:])
    for value, users in enumerate(problem.readers):
        order = sorted(users, key=place.__getitem__)
        for kept in range(len(order)):
            later = [user for user in order[kept:] if user in movable]
            if later == order[kept:]:
                at = place[order[kept - 1]] if kept else place[problem.producer[value]]
                rest = [operator for operator in sequence[at + 1 :] if operator not in later]
                yield from _legal(problem, [*sequence[: at + 1], *later], rest)


def _legal(problem: Problem, first: Sequence[int], then: Sequence[int]) -> Iterator[Schedule]:
    sequence = (*first, *then)
    if problem.why_illegal(sequence) is None:
        schedule = Schedule(problem, sequence)
        schedule.prune(range(len(sequence)))
        yield schedule


def _all_gaps(schedule: Schedule) -> list[Gap]:
    """Every gap of every version, those that take most room first."""
    problem, found = schedule.problem, []
    for value in schedule.evictable:
        for event in schedule.made[value]:
            if value in problem.held and schedule.is_held(event, value):
                continue
            for reader in schedule.uses[event][value]:
                gap = Gap(event, value, reader)
                span = schedule.span(gap)
                if span is not None and span[1] >= span[0]:
                    found.append((problem.size[value] * (span[1] - span[0]), gap))
    return [gap for _, gap in sorted(found, reverse=True)]
