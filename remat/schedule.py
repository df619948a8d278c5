"""A sequence of operators that can be changed step by step, with the bytes alive at every step kept up to date.

Two moves lead from any legal sequence to any other that runs its operators in the same relative order at first:
evict a value in a gap between two of its readers, running its operator (and what that needs) again before the later
one; and keep a value over such a gap, so that the second run falls away.

Positions shift as steps come and go, so a step is known by its event, which never changes. All arrays are numpy's: a
move is a few slices of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat.problem import Problem
from remat.rerun import Needed

Ints = NDArray[np.int64]

# How far before the next reader a second run may be placed where there is no room right before it. Backward operators
# of one layer are some ten to thirty steps: on ViT the derivative of a GELU fits before its incoming gradient.
EARLIER_STEPS: Final = (8, 32, 128)


class Gap(NamedTuple):
    """A version (made at `event`, of `value`) right before one of its readers, when nobody else reads it."""

    event: int
    value: int
    reader: int


@dataclass(frozen=True)
class Eviction:
    """What evicting in a gap takes: operators to run again right before an event.

    relief: excess (bytes x steps above the budget) that it takes away; cost: what the operators cost.
    """

    operators: tuple[int, ...]
    before: int
    gap: Gap
    relief: int
    cost: int


@dataclass(frozen=True)
class Hoist:
    """Running the event that reads a value next right after the one that read it last, so that it dies earlier."""

    event: int
    before: int
    relief: int
    cost: int = 0


class Schedule:
    """A legal sequence of a problem, as events; see the module."""

    def __init__(self, problem: Problem, sequence: Sequence[int]) -> None:
        self.problem = problem
        count = len(sequence)
        self.operator: list[int] = list(sequence)  # by event
        self.order: Ints = np.arange(count, dtype=np.int64)  # by position: the event
        self.position: Ints = np.arange(count, dtype=np.int64)  # by event
        self.source: list[dict[int, int]] = []  # by event: for each value it reads, the event that made it
        self.uses: list[dict[int, list[int]]] = []  # by event: for each value it made, its readers in order
        self.made: list[list[int]] = [[] for _ in problem.size]  # by value: the events that make it, in order
        self.runs = [0] * len(problem.reads)
        self._written = [sum(map(problem.size.__getitem__, values)) for values in problem.writes]
        self.boundary_event = -1
        for event, operator in enumerate(sequence):
            sources = {value: self.made[value][-1] for value in problem.reads[operator]}
            for value, maker in sources.items():
                self.uses[maker][value].append(event)
            self.source.append(sources)
            self.uses.append({value: [] for value in problem.writes[operator]})
            for value in problem.writes[operator]:
                self.made[value].append(event)
            self.runs[operator] += 1
            if operator == problem.boundary:
                self.boundary_event = event
        self.evictable = [
            value
            for value, size in enumerate(problem.size)
            if size and problem.producer[value] not in problem.once and problem.readers[value]
        ]
        self.known_cost: dict[Gap, float] = {}  # of evicting in a gap, when it was last evaluated
        self.alive: Ints = np.array(problem.profile(sequence), dtype=np.int64)
        self.cost = problem.recompute_cost(sequence)

    # --- reading ---------------------------------------------------------------------------------------------

    def sequence(self) -> tuple[int, ...]:
        """The operators in the order they run."""
        operator = self.operator
        return tuple(operator[event] for event in self.order.tolist())

    @property
    def peak(self) -> int:
        """The most bytes alive during any step."""
        return int(self.alive.max())

    def is_held(self, event: int, value: int) -> bool:
        """Whether this version lives to the end."""
        return value in self.problem.held and self.made[value][0] == event

    def last(self, event: int, value: int) -> int:
        """The last position that a version is alive in."""
        if self.is_held(event, value):
            return len(self.order) - 1
        readers = self.uses[event][value]
        return int(self.position[readers[-1]]) if readers else int(self.position[event])

    def newest(self, value: int, position: int) -> int | None:
        """The event that made the newest version of a value before a position; None if there is none yet."""
        found = None
        for event in self.made[value]:
            if self.position[event] >= position:
                break
            found = event
        return found

    def gaps_at(self, position: int) -> list[Gap]:
        """Where a version is alive during a step without being read there."""
        problem, found = self.problem, []
        place: list[int] = self.position.tolist()
        for value in self.evictable:
            for event in self.made[value]:
                readers = self.uses[event][value]
                if place[event] >= position or not readers or place[readers[-1]] <= position:
                    continue
                index = bisect_left(readers, position, key=place.__getitem__)
                if place[readers[index]] > position and not (value in problem.held and self.is_held(event, value)):
                    found.append(Gap(event, value, readers[index]))
        return found

    def span(self, gap: Gap) -> tuple[int, int] | None:
        """First and last position of a gap; None where the reader reads another version by now."""
        if self.source[gap.reader].get(gap.value) != gap.event:
            return None
        readers = self.uses[gap.event][gap.value]
        index = bisect_left(readers, self.position[gap.reader], key=self.position.__getitem__)
        start = int(self.position[readers[index - 1] if index else gap.event]) + 1
        return start, int(self.position[gap.reader]) - 1

    def second_runs(self) -> list[int]:
        """Events that run an operator again."""
        seen: set[int] = set()
        found = []
        for event in self.order.tolist():
            operator = self.operator[event]
            if operator in seen:
                found.append(event)
            seen.add(operator)
        return found

    # --- evicting --------------------------------------------------------------------------------------------

    def evaluate(
        self, gap: Gap, start: int, end: int, budget: int, rate: float, limit: float = math.inf
    ) -> Eviction | float:
        """What evicting in a gap would take and bring; 0.0 if it brings nothing.

        Of each value that is no longer there to compute from, either the life is prolonged or its operator runs again
        too: whichever is cheaper at `rate`, the cost of one unit of excess. The operators run right before the next
        reader, or earlier in the gap where there is more room for them. What costs more than `limit` is not followed
        to its end; returned is then what its ratio of relief to cost cannot exceed.
        """
        size = self.problem.size[gap.value]
        excess = np.minimum(np.maximum(self.alive[start : end + 1] - budget, 0), size)
        available = int(excess.sum())
        if not available:
            return 0.0
        bound = 0.0
        for each_rate in (rate, math.inf):  # prolonging may eat up all the relief where running again does not
            needed = Needed(self, end + 1, budget, each_rate, limit)
            needed.run(self.problem.producer[gap.value])
            if not needed.possible:
                if needed.cost > limit:
                    bound = max(bound, available / (needed.cost + 1))
                continue
            crowded = needed.excess_while_running(self._across(end + 1, gap.value))
            relief = available - needed.penalty - crowded
            if crowded:
                found = self._evaluate_earlier(gap, start, end, budget, each_rate, limit)
                if found is not None and found.relief > relief:
                    return found
            if relief > 0:
                return Eviction(tuple(needed.operators), int(self.order[end + 1]), gap, relief, needed.cost)
        return bound

    def note_cost(self, gap: Gap, result: Eviction | float, most: int) -> None:
        """Remember what evicting cost, or what its bound says; infinite where it would bring nothing."""
        if isinstance(result, Eviction):
            self.known_cost[gap] = result.cost
        else:
            self.known_cost[gap] = most / result if result else math.inf

    def _evaluate_earlier(
        self, gap: Gap, start: int, end: int, budget: int, rate: float, limit: float
    ) -> Eviction | None:
        size, best = self.problem.size[gap.value], None
        tried: set[int] = set()
        for reach in EARLIER_STEPS:
            low = max(start + 1, end + 1 - reach)
            if low > end:
                continue
            at = low + int(self.alive[low : end + 1].argmin())
            if at in tried:
                continue
            tried.add(at)
            needed = Needed(self, at, budget, rate, limit)
            needed.run(self.problem.producer[gap.value])
            if not needed.possible:
                continue
            relief = int(np.minimum(np.maximum(self.alive[start:at] - budget, 0), size).sum())
            relief -= needed.penalty + needed.excess_while_running(self._across(at, gap.value))
            if relief > 0 and (best is None or relief > best.relief):
                best = Eviction(tuple(needed.operators), int(self.order[at]), gap, relief, needed.cost)
        return best

    def _across(self, at: int, again: int | None = None) -> int:
        """Bytes alive through the moment right before a step; without those that making a value again replaces."""
        operator = self.operator[int(self.order[at])]
        count = int(self.alive[at]) - self.problem.scratch[operator] - self._written[operator]
        if again is None:
            return count
        for value in self.problem.writes[self.problem.producer[again]]:
            older = self.newest(value, at)
            if older is not None and self.last(older, value) >= at and not self.is_held(older, value):
                count -= self.problem.size[value]
        return count

    def force(self, gap: Gap, budget: int) -> Eviction | None:
        """Evicting in a gap whatever it brings; None where its operator cannot run again there."""
        span = self.span(gap)
        if span is None:
            return None
        needed = Needed(self, span[1] + 1, budget, math.inf, math.inf)
        needed.run(self.problem.producer[gap.value])
        return Eviction(tuple(needed.operators), gap.reader, gap, 0, needed.cost) if needed.possible else None

    def evict(self, eviction: Eviction) -> None:
        """Do it."""
        self.insert(eviction.operators, eviction.before)
        self.prune([eviction.gap.event])  # a run of the forward for what the backward now makes

    def evaluate_hoist(self, gap: Gap, start: int, end: int, budget: int) -> Hoist | None:
        """What running the next reader at the gap's start would bring; None if it brings nothing or cannot be."""
        problem, user = self.problem, int(self.order[end + 1])
        operator = self.operator[user]
        if operator in problem.once or any(value in problem.held for value in problem.writes[operator]):
            return None
        if self._written[operator] >= problem.size[gap.value] * 2:
            return None
        change = np.zeros(end + 2 - start, dtype=np.int64)
        change[:-1] += self._written[operator]
        for value, maker in self.source[user].items():
            if int(self.position[maker]) >= start:
                return None
            readers = self.uses[maker][value]
            if readers[-1] == user and not self.is_held(maker, value):
                before = int(self.position[readers[-2]]) if len(readers) > 1 else int(self.position[maker])
                change[max(before + 1 - start, 0) :] -= problem.size[value]
        if problem.unsavable and start <= int(self.position[self.boundary_event]) <= end:
            return None
        excess = self.alive[start : end + 2] - budget
        relief = int(np.maximum(excess, 0).sum() - np.maximum(excess + change, 0).sum())
        # The new step itself: everything alive there, and what it writes.
        relief -= max(0, self._across(start) + self._written[operator] + problem.scratch[operator] - budget)
        return Hoist(user, int(self.order[start]), relief) if relief > 0 else None

    def hoist(self, move: Hoist) -> None:
        """Do it."""
        self.insert([self.operator[move.event]], move.before)
        self.keep(move.event)

    def rerun_earlier(self, event: int, before: int, budget: int) -> bool:
        """Run a second run, with what it needs, right before an earlier event instead; False where it cannot be."""
        operator, at = self.operator[event], int(self.position[before])
        older = [self.newest(value, int(self.position[event])) for value in self.uses[event]]
        if any(maker is None or int(self.position[maker]) >= at for maker in older):
            return False
        crossing = int(self.position[self.boundary_event]) if self.boundary_event >= 0 else -1
        if at <= crossing < int(self.position[event]):
            return False
        needed = Needed(self, at, budget, math.inf, math.inf)
        needed.run(operator)
        if not needed.possible:
            return False
        self.insert(needed.operators, before)
        self.keep(event)
        return True

    def insert(self, operators: Sequence[int], before: int) -> None:
        """Run operators again, in this order, right before an event; readers from there on take the new values."""
        at, count = int(self.position[before]), len(operators)
        events = list(range(len(self.operator), len(self.operator) + count))
        across = self._across(at)
        self.order = np.concatenate([self.order[:at], np.array(events, dtype=np.int64), self.order[at:]])
        self.alive = np.concatenate([self.alive[:at], np.full(count, across, dtype=np.int64), self.alive[at:]])
        self.position = np.concatenate([self.position, np.arange(at, at + count, dtype=np.int64)])
        self.position[self.order[at + count :]] += count
        for event, operator in zip(events, operators, strict=True):
            self._add_run(event, operator)

    def _add_run(self, event: int, operator: int) -> None:
        problem, at = self.problem, int(self.position[event])
        self.operator.append(operator)
        sources: dict[int, int] = {}
        for value in problem.reads[operator]:
            maker = self.newest(value, at)
            assert maker is not None
            sources[value] = maker
            self._add_use(maker, value, event)
        self.source.append(sources)
        self.uses.append({value: [] for value in problem.writes[operator]})
        self.runs[operator] += 1
        self.cost += problem.cost[operator]
        self.alive[at] += problem.scratch[operator]
        for value in problem.writes[operator]:
            older = self.newest(value, at)
            makers = self.made[value]
            makers.insert(bisect_left(makers, at, key=self.position.__getitem__), event)
            self.alive[at] += problem.size[value]
            if older is None:
                continue
            readers = self.uses[older][value]
            index = bisect_left(readers, at, key=self.position.__getitem__)
            later = readers[index:]
            if later:
                self._shorten(older, value, index)
                self.uses[event][value] = later
                for user in later:
                    self.source[user][value] = event
                self.alive[at + 1 : int(self.position[later[-1]]) + 1] += problem.size[value]

    def _add_use(self, maker: int, value: int, event: int) -> None:
        before = self.last(maker, value)
        readers = self.uses[maker][value]
        at = int(self.position[event])
        readers.insert(bisect_left(readers, at, key=self.position.__getitem__), event)
        if at > before:
            self.alive[before + 1 : at + 1] += self.problem.size[value]

    def _shorten(self, maker: int, value: int, index: int) -> None:
        """Drop a version's uses from an index on."""
        before = self.last(maker, value)
        del self.uses[maker][value][index:]
        after = self.last(maker, value)
        if after < before:
            self.alive[after + 1 : before + 1] -= self.problem.size[value]

    # --- keeping ---------------------------------------------------------------------------------------------

    def may_keep(self, event: int, budget: int) -> bool:
        """Whether a second run can fall away, its readers taking the versions before it, within the budget."""
        problem, at = self.problem, int(self.position[event])
        if len(self.uses[event]) == 1:
            ((value, readers),) = self.uses[event].items()
            return not readers or self._may_bridge(event, value, at, budget)
        spans: list[tuple[int, int]] = []
        for value, readers in self.uses[event].items():
            if readers:
                if not self._may_bridge(event, value, at, budget):
                    return False
                older = self.newest(value, at)
                assert older is not None
                spans.append((self.last(older, value) + 1, problem.size[value]))
        if len(spans) < 2:
            return True
        added = np.zeros(at - min(start for start, _ in spans) if spans else 0, dtype=np.int64)
        for start, size in spans:
            if start < at:
                added[start - at :] += size
        return not len(added) or int((self.alive[at - len(added) : at] + added).max()) <= budget

    def _may_bridge(self, event: int, value: int, at: int, budget: int) -> bool:
        older = self.newest(value, at)
        if older is None:
            return False
        start = self.last(older, value) + 1
        if value in self.problem.unsavable and self.boundary_event >= 0:
            crossing = int(self.position[self.boundary_event])
            if int(self.position[older]) < crossing < at:
                return False
        return start >= at or int(self.alive[start:at].max()) + self.problem.size[value] <= budget

    def keep(self, event: int) -> None:
        """Let a second run fall away, and every run that was there for it alone."""
        at = int(self.position[event])
        for value, readers in self.uses[event].items():
            self.made[value].remove(event)
            older = self.newest(value, at)
            if not readers:
                continue
            assert older is not None
            end = int(self.position[readers[-1]])
            self.alive[at + 1 : end + 1] -= self.problem.size[value]
            for user in readers:
                self.source[user][value] = older
            before = self.last(older, value)
            kept = self.uses[older][value]
            self.uses[older][value] = kept + readers
            if end > before:
                self.alive[before + 1 : end + 1] += self.problem.size[value]
            self.uses[event][value] = []
        self._remove([event])

    def _remove(self, events: list[int]) -> None:
        """Take events away that nobody reads, and then those that they alone read."""
        problem = self.problem
        gone: list[int] = []
        pending = list(events)
        while pending:
            event = pending.pop()
            operator = self.operator[event]
            if gone and not self._is_idle(event):
                continue  # another run of the same operator has fallen away meanwhile
            gone.append(int(self.position[event]))
            self.runs[operator] -= 1
            self.cost -= problem.cost[operator]
            for value in self.uses[event]:
                if event in self.made[value]:
                    self.made[value].remove(event)
            for value, maker in self.source[event].items():
                before = self.last(maker, value)
                self.uses[maker][value].remove(event)
                after = self.last(maker, value)
                if after < before:
                    self.alive[after + 1 : before + 1] -= problem.size[value]
                if self._is_idle(maker) and maker not in pending:
                    pending.append(maker)
            self.source[event] = {}
        if len(gone) == 1:  # by far the most common; np.delete takes ten times as long as the slices
            at = gone[0]
            self.order = np.concatenate([self.order[:at], self.order[at + 1 :]])
            self.alive = np.concatenate([self.alive[:at], self.alive[at + 1 :]])
            self.position[self.order[at:]] -= 1
        else:
            kept = np.ones(len(self.order), dtype=bool)
            kept[gone] = False
            self.order, self.alive = self.order[kept], self.alive[kept]
            self.position[self.order] = np.arange(len(self.order))

    def _is_idle(self, event: int) -> bool:
        """Whether an event is not read and its operator runs elsewhere."""
        if self.runs[self.operator[event]] < 2:
            return False
        return not any(readers or self.is_held(event, value) for value, readers in self.uses[event].items())

    def prune(self, events: Iterable[int]) -> None:
        """Take those of these events away that have become idle."""
        for event in events:
            if self._is_placed(event) and self._is_idle(event):
                self._remove([event])

    def _is_placed(self, event: int) -> bool:
        at = int(self.position[event])
        return at < len(self.order) and int(self.order[at]) == event
