"""The certificate: no sequence within a peak recomputes for less than this.

Put a price m_t >= 0 on a byte at some moments t: the boundary, and operators of the backward. In any sequence of peak
at most B, the values saved at the boundary live at least until an operator of the backward can first need them, and
beside them at moment t is what is there whatever is recomputed, L_t. So

    cost  >=  min over sets of saved and recomputed values  [ cost of recomputing + sum_t m_t x saved bytes alive at t ]
              -  sum_t m_t (B - L_t)

and the minimum is a minimum cut: Lagrangian relaxation of the budget at every moment (cf. Geoffrion, 1974), with each
operator counted once however often it runs, so that it bounds nested schedules too. Any prices give a valid bound; a
few steps of subgradient ascent look for good ones. Integers throughout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from remat.maxflow import Arcs, maximum_flow, sink_side
from remat.problem import Problem

# Moments besides the boundary that get a price.
MOMENTS: Final = 12
# Cuts for the price of the boundary alone, and for the prices of all moments after that.
BISECTIONS: Final = 12
ASCENTS: Final = 8


@dataclass(frozen=True, eq=False)
class RecomputeBound:
    """Lower bounds on the recompute cost of one problem, for any budget."""

    problem: Problem

    def within(self, budget: int) -> int | None:
        """No sequence of at most this peak costs less; None: there is no such sequence."""
        room = [budget - alive for alive in self._alive_anyway]
        if min(room) < 0 or budget < self.problem.lower_bound_bytes():
            return None
        moments = self._moments
        prices = [0] * len(moments)
        best, low, high = 0, 0, self._dearest
        for _ in range(BISECTIONS):  # the bound is concave in the price of the boundary
            middle = (low * high) ** 0.5 if low else high / 2**16
            prices[0] = max(int(middle), low + 1)
            value, loads = self._relaxed(prices, room)
            best = max(best, value)
            low, high = (prices[0], high) if loads[0] > room[moments[0]] else (low, prices[0])
            if high - low <= max(1, low // 64):
                break
        prices[0] = low
        return self._ascend(prices, room, best)

    def _ascend(self, prices: list[int], room: Sequence[int], best: int) -> int:
        """Subgradient steps on the prices of all moments, with Polyak's length towards a bound a tenth higher."""
        for _ in range(ASCENTS):
            value, loads = self._relaxed(prices, room)
            best = max(best, value)
            slope = [load - room[moment] for load, moment in zip(loads, self._moments, strict=True)]
            slope = [g if g > 0 or price else 0 for g, price in zip(slope, prices, strict=True)]
            length = sum(g * g for g in slope)
            if not length:
                break
            wanted = best + max(best // 10, 1) - value
            prices = [max(0, price + wanted * g // length) for price, g in zip(prices, slope, strict=True)]
        return best

    # --- the relaxation ----------------------------------------------------------------------------------------

    def _relaxed(self, prices: Sequence[int], room: Sequence[int]) -> tuple[int, list[int]]:
        """The bound at these prices, and the saved bytes alive at each moment in the plan that attains it."""
        before = [0, *itertools.accumulate(prices)]  # prices of the moments before each
        moments = self._moments
        capacities: list[int | None] = []
        for kind, which in self._arcs_meaning:
            if kind == "run":
                capacities.append(None if which in self.problem.once else self._again[which])
            elif kind == "save":
                free = which in self.problem.unsavable
                capacities.append(None if free else before[self._priced_moments[which]] * self._price_bytes[which])
            else:
                capacities.append(None)
        value, residual = maximum_flow(self._arcs, capacities, self._source, self._sink)
        reaches = sink_side(self._arcs, residual, self._sink)
        loads = [0] * len(moments)
        for kind, which in self._arcs_meaning:
            if kind == "save":
                maker, there = self._operator_vertex[self.problem.producer[which]], self._value_vertex[which]
                if reaches[there] and not reaches[maker]:
                    for moment in range(self._priced_moments[which]):
                        loads[moment] += self._price_bytes[which]
        paid = sum(price * room[moment] for price, moment in zip(prices, moments, strict=True))
        return value - paid, loads

    @cached_property
    def _fixed(self) -> tuple[int, ...]:
        return self.problem.fixed

    @cached_property
    def _rank(self) -> dict[int, int]:
        return {operator: rank for rank, operator in enumerate(self._fixed)}

    @cached_property
    def _alive_anyway(self) -> list[int]:
        """L_t for each operator of the backward, the boundary first."""
        return self.problem.alive_anyway()

    @cached_property
    def _moments(self) -> list[int]:
        """The boundary, and of each stretch of the backward the moment where most is alive anyway."""
        count = len(self._fixed)
        cuts = sorted({1 + (count - 1) * part // MOMENTS for part in range(MOMENTS + 1)})
        alive = self._alive_anyway
        inner = [max(range(a, b), key=alive.__getitem__) for a, b in itertools.pairwise(cuts) if a < b]
        return [0, *inner]

    @cached_property
    def _needed(self) -> list[int]:
        """Operators that may run after the boundary for what the backward reads, producers first."""
        fixed = set(self._fixed)
        pending = [self.problem.producer[v] for o in self._fixed[1:] for v in self.problem.reads[o]]
        found: set[int] = set()
        while pending:
            operator = pending.pop()
            if operator not in found and operator not in fixed:
                found.add(operator)
                pending += [self.problem.producer[value] for value in self.problem.reads[operator]]
        return [operator for operator in self.problem.order if operator in found]

    @cached_property
    def _first_need(self) -> dict[int, int]:
        """For each value the first operator of the backward, by rank, that reads it or what is made from it."""
        first: dict[int, int] = {}
        needed = set(self._needed)
        for operator in reversed(self._needed):
            for value in self.problem.writes[operator]:
                ranks = [self._rank[user] for user in self.problem.readers[value] if user in self._rank]
                ranks = [rank for rank in ranks if rank]  # the boundary itself needs nothing again
                for user in self.problem.readers[value]:
                    if user in needed:
                        ranks += [first[written] for written in self.problem.writes[user] if written in first]
                if ranks:
                    first[value] = min(ranks)
        return first

    @cached_property
    def _priced_moments(self) -> dict[int, int]:
        """For each value how many of the moments lie before it can be needed."""
        return {
            value: sum(1 for moment in self._moments if moment < first) for value, first in self._first_need.items()
        }

    @cached_property
    def _price_bytes(self) -> dict[int, int]:
        """Bytes that saving a value adds to what is alive anyway."""
        counted = self.problem.held | {v for o in self.problem.once for v in self.problem.writes[o]}
        return {v: 0 if v in counted else self.problem.size[v] for v in self._first_need}

    @cached_property
    def _again(self) -> dict[int, int]:
        """Cost of running an operator after the boundary: what need not run before it runs once either way."""
        before = self.problem.before_boundary
        return {o: self.problem.cost[o] if o in before else 0 for o in self._needed}

    @cached_property
    def _dearest(self) -> int:
        """A price at which every byte is dearer than recomputing everything."""
        return 1 + sum(self._again.values())

    # --- the network: operator -> its values -> operators that read them; the backward is the sink ---------------

    @cached_property
    def _operator_vertex(self) -> dict[int, int]:
        return {operator: number for number, operator in enumerate(self._needed)}

    @cached_property
    def _value_vertex(self) -> dict[int, int]:
        return {value: len(self._needed) + number for number, value in enumerate(self._first_need)}

    @property
    def _source(self) -> int:
        return len(self._needed) + len(self._first_need)

    @property
    def _sink(self) -> int:
        return self._source + 1

    @cached_property
    def _arcs_meaning(self) -> list[tuple[str, int]]:
        return [meaning for _, _, meaning in self._all_arcs]

    @cached_property
    def _arcs(self) -> Arcs:
        return Arcs.build(self._sink + 1, [(tail, head) for tail, head, _ in self._all_arcs])

    @cached_property
    def _all_arcs(self) -> list[tuple[int, int, tuple[str, int]]]:
        problem, arcs = self.problem, []
        needed = self._operator_vertex
        for operator, vertex in needed.items():
            arcs.append((self._source, vertex, ("run", operator)))
        for value, vertex in self._value_vertex.items():
            arcs.append((needed[problem.producer[value]], vertex, ("save", value)))
            users = problem.readers[value]
            arcs += [(vertex, needed[user], ("use", value)) for user in users if user in needed]
            if any(self._rank.get(user, 0) for user in users):
                arcs.append((vertex, self._sink, ("use", value)))
        return arcs
