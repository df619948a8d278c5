"""Search for orders with little memory: single steps move earlier or later while what they read and make allows it.

What moving one step changes at the steps that it passes does not depend on how far it goes, so one cumulative sum
gives the excess (bytes x steps above a budget) for every place it can go to, and one draw picks among them.
For problems with one value per operator, none of them held (`single_valued`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import numpy as np

from remat.problem import Problem
from remat.schedule import Ints, Schedule

# What a temperature comes down to, as a share of what it starts from.
COOLING: Final = 1e-2


class Slides:
    """Moves of single events of a schedule, which may run operators again, and what they change of the excess."""

    def __init__(self, schedule: Schedule, budget: int) -> None:
        self.schedule, self.budget = schedule, budget
        self.written: Ints = np.zeros(0, dtype=np.int64)  # by event
        self.grow()

    def grow(self) -> None:
        """Take notice of events that have been added to the schedule."""
        size, known = self.schedule.problem.size, len(self.written)
        added = [size[operator] for operator in self.schedule.operator[known:]]
        self.written = np.concatenate([self.written, np.array(added, dtype=np.int64)])

    @property
    def excess(self) -> int:
        """Bytes x steps above the budget."""
        return int(np.maximum(self.schedule.alive - self.budget, 0).sum())

    def window(self, event: int) -> tuple[int, int]:
        """The first and the last position that an event may move to, with every reader keeping its source."""
        schedule = self.schedule
        position, operator = schedule.position, schedule.operator[event]
        low, high = 0, len(schedule.order) - 1
        for value, maker in schedule.source[event].items():
            low = max(low, int(position[maker]) + 1)
            made = schedule.made[value]
            if len(made) > 1 and made[-1] != maker:
                high = min(high, int(position[made[made.index(maker) + 1]]) - 1)
        readers, made = schedule.uses[event][operator], schedule.made[operator]
        if readers:
            high = min(high, int(position[readers[0]]) - 1)
        if len(made) > 1:
            index = made.index(event)
            if index:
                low = max(low, schedule.last(made[index - 1], operator) + 1)
            if index + 1 < len(made):
                high = min(high, int(position[made[index + 1]]) - 1)
        return low, high

    def changes(self, event: int, low: int, high: int) -> Ints:
        """What moving an event to each position from low to high adds to the excess."""
        schedule, size, position = self.schedule, self.schedule.problem.size, self.schedule.position
        at = int(position[event])
        here = at - low
        own, carried = self._own(event)
        passed = np.full(high - low + 1, carried, dtype=np.int64)  # bytes added at a step that the event moves past
        passed[here:] = -carried
        ending, read = 0, []  # what ends with the event; what ends later, before the window's end
        for value, maker in schedule.source[event].items():
            others = schedule.uses[maker][value]
            if others[-1] == event:
                other = int(position[others[-2]]) if len(others) > 1 else int(position[maker])
                if other < at - 1:
                    passed[max(other + 1 - low, 0) : here] -= size[value]
                ending += size[value]
            else:
                other = int(position[others[-1]])
                if other <= high:
                    passed[other + 1 - low :] += size[value]
                    read.append((other, size[value]))
        passed[here + 1 :] += ending
        alive = schedule.alive[low : high + 1] - self.budget
        added = np.maximum(alive + passed, 0) - np.maximum(alive, 0)
        result = np.zeros(high - low + 1, dtype=np.int64)
        now = max(int(alive[here]), 0)
        if here:
            across = alive[:here] - self.written[schedule.order[low:at]]
            result[:here] = added[:here][::-1].cumsum()[::-1] + np.maximum(across + own, 0) - now
        if high > at:
            # Alive through the moment after each position, without the event: what it reads, and not what it makes.
            behind = np.full(high - at, own - carried + ending - self.budget, dtype=np.int64)
            next_alive = schedule.alive[at + 2 : high + 2]
            behind[: len(next_alive)] += next_alive - self.written[schedule.order[at + 2 : high + 2]]
            for other, bytes_ in read:
                behind[max(other - at - 1, 0) :] += bytes_
            result[here + 1 :] = added[here + 1 :].cumsum() + np.maximum(behind, 0) - now
        return result

    def _own(self, event: int) -> tuple[int, int]:
        """The bytes that an event makes, and those of them that live on."""
        schedule = self.schedule
        operator = schedule.operator[event]
        own = schedule.problem.size[operator]
        return own, own if schedule.uses[event][operator] else 0

    def move(self, event: int, to: int) -> None:
        """Move an event to a position within its window."""
        position, order = self.schedule.position, self.schedule.order
        at = int(position[event])
        if to < at:
            self._move_earlier(event, at, to)
            order[to + 1 : at + 1] = order[to:at].copy()
            order[to] = event
            position[order[to : at + 1]] = np.arange(to, at + 1)
        elif to > at:
            self._move_later(event, at, to)
            order[at:to] = order[at + 1 : to + 1].copy()
            order[to] = event
            position[order[at : to + 1]] = np.arange(at, to + 1)
        for value, maker in self.schedule.source[event].items():
            readers = self.schedule.uses[maker][value]
            if len(readers) > 1:
                readers.sort(key=position.__getitem__)

    def _move_earlier(self, event: int, at: int, to: int) -> None:
        schedule, size, position = self.schedule, self.schedule.problem.size, self.schedule.position
        own, carried = self._own(event)
        alive = schedule.alive
        during = int(alive[to]) - int(self.written[schedule.order[to]]) + own
        alive[to:at] += carried
        for value, maker in schedule.source[event].items():
            readers = schedule.uses[maker][value]
            if readers[-1] == event:
                other = int(position[readers[-2]]) if len(readers) > 1 else int(position[maker])
                alive[max(other + 1, to) : at] -= size[value]
        alive[to + 1 : at + 1] = alive[to:at].copy()
        alive[to] = during

    def _move_later(self, event: int, at: int, to: int) -> None:
        schedule, size, position = self.schedule, self.schedule.problem.size, self.schedule.position
        own, carried = self._own(event)
        alive = schedule.alive
        during = own - carried
        if to + 1 < len(alive):
            during += int(alive[to + 1]) - int(self.written[schedule.order[to + 1]])
        for value, maker in schedule.source[event].items():
            readers = schedule.uses[maker][value]
            other = at if readers[-1] == event else int(position[readers[-1]])
            if other <= to:
                alive[other + 1 : to + 1] += size[value]
                during += size[value]
        alive[at + 1 : to + 1] -= carried
        alive[at:to] = alive[at + 1 : to + 1].copy()
        alive[to] = during

    def draw(self, event: int, temperature: float, rng: random.Random) -> tuple[int, int] | None:
        """A place for an event, likelier the less excess it has, and what that changes; None to leave it there."""
        low, high = self.window(event)
        if low == high:
            return None
        changes = self.changes(event, low, high)
        sums = np.exp((changes.min() - changes) * (1 / temperature)).cumsum()
        index = min(int(sums.searchsorted(rng.random() * sums[-1], side="right")), high - low)
        if low + index == self.schedule.position[event]:
            return None
        return low + index, int(changes[index])


def order_within(
    problem: Problem, sequence: Sequence[int], budget: int, steps: int, heat: float, seed: int
) -> tuple[tuple[int, ...], int]:
    """Anneal an order to little excess above a budget, from a temperature of `heat` mean sizes; it and its excess."""
    rng = random.Random(seed)
    schedule = Schedule(problem, sequence)
    slides = Slides(schedule, budget)
    start = heat * max(sum(problem.size) / len(problem.size), 1)
    excess = slides.excess
    best, best_order = excess, schedule.order.copy()
    count = len(schedule.order)
    for step in range(steps):
        if not best:
            break
        event = rng.randrange(count)
        drawn = slides.draw(event, start * COOLING ** (step / steps), rng)
        if drawn is None:
            continue
        slides.move(event, drawn[0])
        excess += drawn[1]
        if excess < best:
            best, best_order = excess, schedule.order.copy()
    return tuple(schedule.operator[event] for event in best_order.tolist()), best
