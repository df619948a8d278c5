"""Rematerialization as plain data, without torch: operators that read and write values, and sequences of them.

A sequence runs every operator at least once, in an order that respects what each reads; an operator that runs again
makes new versions of the values it writes, and a reader takes the newest. A version takes its bytes from the step
that makes it to the last step that reads it; the first version of a held value (an output, a gradient) to the end.
All values of an operator are born with it. Memory during a step is what is alive then, and the operator's scratch.

A training step is one such problem: the forward, an operator that stands for the moment between the two graphs (the
`boundary`: it reads the forward's outputs and brings the incoming gradients), and the backward. What is alive while
the boundary runs is what is saved. This is the model of Checkmate (Jain et al., MLSys 2020) and Moccasin (Bartan et
al., ICML 2023) with several values per operator, scratch, and values that may not be kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class Problem:
    """Operators 0..n-1 and values 0..m-1.

    reads, writes: for each operator the values it reads, and those that are born with it; each value is written by
        exactly one operator. Inputs of the whole cost nothing and are no values.
    cost: of running each operator once more (integers >= 0, any unit).
    size: bytes of each value.
    scratch: bytes that each operator takes for itself while it runs.
    order: the baseline, every operator once.
    once: operators that run exactly once (gradients, random draws, writes).
    held: values whose first version lives to the end.
    boundary: the operator between forward and backward, or None where there is no such thing. It and all that
        depends on it, the backward, run once and keep the order of the baseline.
    unsavable: values that may not be alive while the boundary runs.
    """

    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    cost: tuple[int, ...]
    size: tuple[int, ...]
    scratch: tuple[int, ...]
    order: tuple[int, ...]
    once: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    boundary: int | None = None
    unsavable: frozenset[int] = frozenset()

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """The operator that writes each value."""
        found = [-1] * len(self.size)
        for operator, values in enumerate(self.writes):
            for value in values:
                found[value] = operator
        return tuple(found)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The operators that read each value, ascending."""
        found: list[list[int]] = [[] for _ in self.size]
        for operator, values in enumerate(self.reads):
            for value in values:
                found[value].append(operator)
        return tuple(tuple(users) for users in found)

    @cached_property
    def baseline_cost(self) -> int:
        """Cost of running everything once."""
        return sum(self.cost)

    @cached_property
    def fixed(self) -> tuple[int, ...]:
        """Operators that run once and in this order: the boundary and what depends on it, or all that run once."""
        if self.boundary is None:
            return tuple(operator for operator in self.order if operator in self.once)
        after = {self.boundary}
        for value in self.writes[self.boundary]:
            after |= self._descendants(value)
        return tuple(operator for operator in self.order if operator in after)

    @cached_property
    def before_boundary(self) -> frozenset[int]:
        """The operators that the boundary needs; without a boundary, all."""
        if self.boundary is None:
            return frozenset(self.order)
        found: set[int] = set()
        pending = [self.boundary]
        while pending:
            makers = {self.producer[value] for value in self.reads[pending.pop()]} - found
            found |= makers
            pending += makers
        return frozenset(found)

    def recompute_cost(self, sequence: Iterable[int]) -> int:
        """Cost of a sequence above that of running everything once."""
        return sum(self.cost[operator] for operator in sequence) - self.baseline_cost

    def lives(self, sequence: Sequence[int]) -> list[tuple[int, int, int]]:
        """Every version in a sequence: (value, step that makes it, last step it is alive in)."""
        newest: dict[int, int] = {}  # by value: its place in the three lists
        values: list[int] = []
        born: list[int] = []
        last: list[int] = []
        forever: list[int] = []
        for step, operator in enumerate(sequence):
            for value in self.reads[operator]:
                last[newest[value]] = step
            for value in self.writes[operator]:
                if value in self.held and value not in newest:
                    forever.append(len(last))
                newest[value] = len(last)
                values.append(value)
                born.append(step)
                last.append(step)
        for version in forever:
            last[version] = len(sequence) - 1
        return list(zip(values, born, last, strict=True))

    def profile(self, sequence: Sequence[int]) -> list[int]:
        """Bytes alive during each step."""
        change = [0] * (len(sequence) + 1)
        for value, born, last in self.lives(sequence):
            change[born] += self.size[value]
            change[last + 1] -= self.size[value]
        alive = itertools.accumulate(change[:-1])
        return [count + self.scratch[operator] for count, operator in zip(alive, sequence, strict=True)]

    def peak(self, sequence: Sequence[int]) -> int:
        """The most bytes alive during any step."""
        return max(self.profile(sequence), default=0)

    def why_illegal(self, sequence: Sequence[int]) -> str | None:
        """The first rule that a sequence breaks; None if it is one of this problem's."""
        made: set[int] = set()
        runs = [0] * len(self.reads)
        for step, operator in enumerate(sequence):
            missing = [value for value in self.reads[operator] if value not in made]
            if missing:
                return f"step {step} (operator {operator}) reads value {missing[0]} before it is made"
            if runs[operator] and operator in self.once:
                return f"operator {operator} runs twice"
            runs[operator] += 1
            made.update(self.writes[operator])
        if 0 in runs:
            return f"operator {runs.index(0)} never runs"
        fixed = set(self.fixed)
        if tuple(operator for operator in sequence if operator in fixed) != self.fixed:
            return "operators of the backward are out of order"
        return self._why_unsavable(sequence)

    def _why_unsavable(self, sequence: Sequence[int]) -> str | None:
        if self.boundary is None or not self.unsavable:
            return None
        at = list(sequence).index(self.boundary)
        there = {value for operator in sequence[:at] for value in self.writes[operator]} & self.unsavable
        for operator in sequence[at + 1 :]:
            for value in self.reads[operator]:
                if value in there:
                    return f"value {value}, which operator {operator} reads, may not be saved"
            there.difference_update(self.writes[operator])
        return None

    def lower_bound_bytes(self) -> int:
        """No sequence has a lower peak: what an operator finds alive whatever is recomputed, itself included."""
        bound = max(self.alive_anyway(), default=0)
        for operator in self.order:  # every operator runs at some time
            values = set(self.reads[operator]) | set(self.writes[operator])
            bound = max(bound, sum(self.size[value] for value in values) + self.scratch[operator])
        return bound

    def alive_anyway(self) -> list[int]:
        """For each of the `fixed` operators the bytes alive while it runs, in every sequence.

        These are the values that it reads and writes, its scratch, held values made by operators that must have run
        before it, values of other fixed operators, made before it and read after it by one of those, and values that
        are made once before the boundary and read after it.
        """
        fixed = self.fixed
        rank = {operator: number for number, operator in enumerate(fixed)}
        change = [0] * (len(fixed) + 1)
        for value, size in enumerate(self.size):
            maker = self.producer[value]
            users = [rank[user] for user in self.readers[value] if user in rank]
            if maker in rank:
                last = len(fixed) - 1 if value in self.held else max([rank[maker], *users])
                change[rank[maker]] += size
                change[last + 1] -= size
                continue
            start = self._held_from(value, rank) if value in self.held else len(fixed)
            if users and maker in self.once and self.boundary is not None and self.boundary in self._descendants(value):
                users = list(range(rank[self.boundary], max(users) + 1))
            for user in users:
                if user < start:
                    change[user] += size
                    change[user + 1] -= size
            if start < len(fixed):
                change[start] += size
                change[len(fixed)] -= size
        alive = itertools.accumulate(change[:-1])
        return [count + self.scratch[operator] for count, operator in zip(alive, fixed, strict=True)]

    def _held_from(self, value: int, rank: dict[int, int]) -> int:
        """The first operator that runs once and reads this held value, or anything computed from it."""
        return min((rank[user] for user in self._descendants(value) if user in rank), default=len(rank))

    def _descendants(self, value: int) -> set[int]:
        found: set[int] = set()
        pending = list(self.readers[value])
        while pending:
            operator = pending.pop()
            if operator not in found:
                found.add(operator)
                pending += [user for written in self.writes[operator] for user in self.readers[written]]
        return found


def single_valued(
    size: Sequence[int], cost: Sequence[int], edges: Iterable[tuple[int, int]], order: Sequence[int]
) -> Problem:
    """The problem of a plain graph: node i makes value i of size[i] bytes, edge (producer, consumer) reads it."""
    reads: list[list[int]] = [[] for _ in size]
    for tail, head in dict.fromkeys(edges):
        reads[head].append(tail)
    return Problem(
        reads=tuple(tuple(sorted(values)) for values in reads),
        writes=tuple((node,) for node in range(len(size))),
        cost=tuple(cost),
        size=tuple(size),
        scratch=(0,) * len(size),
        order=tuple(order),
    )
