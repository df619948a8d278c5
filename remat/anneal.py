"""Simulated annealing of a schedule as a whole: steps move, second runs fall away, values are evicted.

The energy is recompute cost plus rate x excess above the budget. The rate grows while the temperature falls: at
first memory may be overfilled and the order settles, in the end the smallest excess is dearer than any recompute.
For problems with one value per operator, none of them held (`single_valued`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.ordering import Slides
from remat.problem import Problem
from remat.schedule import Eviction, Gap, Schedule

# Shares of the steps that move an event, and that let a second run fall away; the others evict.
SLIDES: Final = 0.7
KEEPS: Final = 0.15
# Gaps drawn for an eviction, of which the one with the most room for its cost is looked at.
DRAWN_GAPS: Final = 100
# Annealing holds the budget less this share: a few bytes of excess left are then no excess yet.
MARGIN: Final = 0.001
# A schedule remembers events that are gone; after so many new ones it is made afresh.
FRESH_AFTER: Final = 500
# Nothing is run again beyond so many times the baseline's cost.
MOST_COST: Final = 4


@dataclass(frozen=True)
class Cooling:
    """Temperature in mean costs and rate in multiples of the given one, each from its start to its end.

    The rate ends at `rates[1]` after three quarters of the steps and then grows on, `quench`-fold.
    """

    heats: tuple[float, float] = (0.05, 0.005)
    rates: tuple[float, float] = (0.5, 20.0)
    quench: float = 50.0

    def at(self, share: float) -> tuple[float, float]:
        """Temperature and rate when this share of the steps is done."""
        heat = self.heats[0] * (self.heats[1] / self.heats[0]) ** share
        rate = self.rates[0] * (self.rates[1] / self.rates[0]) ** min(share / 0.75, 1)
        return heat, rate * self.quench ** max(share * 4 - 3, 0)


class Annealing:
    """One run from a sequence; `best` is the cheapest within the budget that it met, with its cost."""

    def __init__(self, problem: Problem, sequence: Sequence[int], budget: int, rate: float, seed: int) -> None:
        self.problem, self.limit, self.first_rate = problem, budget, rate
        self.budget = int(budget * (1 - MARGIN))
        self.random = random.Random(seed)
        self.mean_cost = max(sum(problem.cost) / len(problem.cost), 1e-9)
        self.temperature = self.rate = 1.0
        self.best: tuple[int, tuple[int, ...]] | None = None
        self._start(sequence)

    def _start(self, sequence: Sequence[int]) -> None:
        self.schedule = Schedule(self.problem, sequence)
        self.slides = Slides(self.schedule, self.budget)
        self.second_runs = self.schedule.second_runs()
        self.excess = self.slides.excess
        self.fresh = len(self.schedule.operator)

    def run(self, steps: int, cooling: Cooling) -> None:
        """Anneal; the state at the end stays in `schedule`."""
        self._note()
        for step in range(steps):
            heat, rate = cooling.at(step / steps)
            self.temperature, self.rate = heat * self.mean_cost, rate * self.first_rate
            kind = self.random.random()
            if kind < SLIDES:
                moved = self._slide()
            elif kind < SLIDES + KEEPS:
                moved = self._keep()
            else:
                moved = self._evict()
            if moved:
                self._note()
                if self.best is not None and not self.best[0]:
                    return

    def _note(self) -> None:
        schedule = self.schedule
        if self.best is not None and schedule.cost >= self.best[0]:
            return
        if self.excess <= (self.limit - self.budget) * len(schedule.order) and schedule.peak <= self.limit:
            self.best = schedule.cost, schedule.sequence()

    def _accepts(self, energy: float) -> bool:
        return energy <= 0 or self.random.random() < math.exp(-energy / self.temperature)

    def _slide(self) -> bool:
        order = self.schedule.order
        event = int(order[self.random.randrange(len(order))])
        drawn = self.slides.draw(event, self.temperature / self.rate, self.random)
        if drawn is None:
            return False
        self.slides.move(event, drawn[0])
        self.excess += drawn[1]
        return True

    def _keep(self) -> bool:
        """Let a second run fall away."""
        if not self.second_runs:
            return False
        schedule, index = self.schedule, self.random.randrange(len(self.second_runs))
        event = self.second_runs[index]
        made = schedule.made[schedule.operator[event]]
        if event not in made or made[0] == event:  # gone, or the first by now
            self.second_runs[index] = self.second_runs[-1]
            self.second_runs.pop()
            return False
        added, saved = _keeping(schedule, event, self.budget)
        if not self._accepts(self.rate * added - saved):
            return False
        schedule.keep(event)
        self.excess = self.slides.excess
        return True

    def _evict(self) -> bool:
        """Evict over one gap, where that relieves."""
        schedule, problem = self.schedule, self.problem
        if not self.excess or schedule.cost > MOST_COST * problem.baseline_cost:
            return False
        found = self._draw_gap()
        if found is None:
            return False
        gap, start, end = found
        above = np.maximum(schedule.alive[start : end + 1] - self.budget, 0)
        most = int(np.minimum(above, problem.size[gap.value]).sum())
        limit = self.rate * most + 5 * self.temperature
        if not most or problem.cost[gap.value] > limit:
            return False
        eviction = schedule.evaluate(gap, start, end, self.budget, self.rate, limit)
        if not isinstance(eviction, Eviction) or not self._accepts(eviction.cost - self.rate * eviction.relief):
            return False
        known = len(schedule.operator)
        schedule.evict(eviction)
        self.slides.grow()
        self.second_runs += range(known, len(schedule.operator))
        self.excess = self.slides.excess
        if len(schedule.operator) > self.fresh + FRESH_AFTER:
            self._start(schedule.sequence())
        return True

    def _draw_gap(self) -> tuple[Gap, int, int] | None:
        """Of some gaps the one with the most bytes x steps for its cost."""
        schedule, problem, top = self.schedule, self.problem, 0.0
        order, position = schedule.order, schedule.position
        found = None
        for _ in range(DRAWN_GAPS):
            event = int(order[self.random.randrange(len(order))])
            operator = schedule.operator[event]
            readers = schedule.uses[event][operator]
            if not readers:
                continue
            index = self.random.randrange(len(readers))
            start = int(position[readers[index - 1] if index else event]) + 1
            end = int(position[readers[index]]) - 1
            score = (end + 1 - start) * problem.size[operator] / (problem.cost[operator] + self.mean_cost * 0.05)
            if score > top:
                top, found = score, (Gap(event, operator, readers[index]), start, end)
        return found


def _keeping(schedule: Schedule, event: int, budget: int) -> tuple[int, int]:
    """Excess that letting a second run fall away adds, and the cost that it saves (with what ran for it alone)."""
    problem, operator, position = schedule.problem, schedule.operator[event], schedule.position
    at, saved = int(position[event]), problem.cost[operator]
    spans = []
    if schedule.uses[event][operator]:
        older = schedule.made[operator][schedule.made[operator].index(event) - 1]
        spans.append((schedule.last(older, operator) + 1, problem.size[operator]))
    for value, maker in schedule.source[event].items():
        readers = schedule.uses[maker][value]
        if readers[-1] == event:
            other = readers[-2] if len(readers) > 1 else maker
            spans.append((int(position[other]) + 1, -problem.size[value]))
    low = min((start for start, _ in spans), default=at)
    change = np.zeros(at - low, dtype=np.int64)
    for start, size in spans:
        change[start - low :] += size
    alive = schedule.alive[low:at] - budget
    added = int(np.maximum(alive + change, 0).sum() - np.maximum(alive, 0).sum())
    pending = [event]
    while pending:
        for value, maker in schedule.source[pending.pop()].items():
            if len(schedule.uses[maker][value]) == 1 and schedule.runs[schedule.operator[maker]] > 1:
                saved += problem.cost[schedule.operator[maker]]
                pending.append(maker)
    return added - max(0, int(schedule.alive[at]) - budget), saved
