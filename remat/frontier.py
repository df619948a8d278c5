"""The convex frontier of price against saved bytes: all of its vertices, and the minimum cuts between two of them.

The price of a cut is the sum of its capacities in femtoseconds, without any price of a byte. As that price grows from
nothing to infinity, the minimum cuts go from the fastest plan to the smallest; what is optimal at some price is on the
lower left hull of all plans. Two neighbours cost the same at one critical price, which is a fraction: all capacities
are multiplied by its denominator, and nothing is ever rounded.

Sources: M. J. Eisner and D. G. Severance, "Mathematical techniques for efficient record segmentation in large shared
databases", 1976, for the recursion; J.-C. Picard and M. Queyranne, "On the structure of all minimum cuts in a network
and applications", 1980, for what lies between two vertices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

import networkx as nx

from remat.errors import InvalidPlan
from remat.mincut import Cut, CutSolver
from remat.network import SOURCE, FlowNetwork, Vertex

# Vertices after which the search for more ends: about twice as many cuts.
MOST: Final = 256


@dataclass(frozen=True)
class Point:
    """A cut by what it costs: `saved` are positions in the joint graph, in order."""

    price_femtoseconds: int
    bytes: int
    saved: tuple[int, ...]
    sink_side: frozenset[Vertex] = field(repr=False)

    def cost(self, byte_price: int, scale: int = 1) -> int:
        """What the cut costs at byte_price / scale for each byte, times scale."""
        return scale * self.price_femtoseconds + byte_price * self.bytes


def convex_frontier(solver: CutSolver, most: int = MOST) -> list[Point]:
    """Every vertex of the lower left convex hull of all cuts, fastest first, in 2 x vertices - 1 cuts.

    From the fastest cut (among equals the one of fewest bytes) to the one of fewest bytes (among equals the fastest).
    `most` vertices end the search, which looks into the widest gap first: fewer are all.
    """
    ties = 1 + _total(solver.network, "bytes")
    fastest = _vertex_at(solver, 0, 1, ties)
    smallest = _vertex_at(solver, 1 + _total(solver.network, "capacity"), 1, ties)
    if fastest.bytes == smallest.bytes:
        return [fastest]
    vertices, gaps = [fastest, smallest], [(fastest, smallest)]
    while gaps and len(vertices) < most:
        first, second = gaps.pop(max(range(len(gaps)), key=lambda number: _width(*gaps[number])))
        byte_price, scale = critical_price(first, second)
        found = _vertex_at(solver, byte_price, scale, ties)
        if found.cost(byte_price, scale) < first.cost(byte_price, scale):
            vertices.append(found)
            gaps += [(first, found), (found, second)]
    return sorted(vertices, key=lambda vertex: vertex.price_femtoseconds)


def critical_price(first: Point, second: Point) -> tuple[int, int]:
    """The price of a byte at which both cost the same, as numerator and denominator. The first is the faster one."""
    byte_price, scale = second.price_femtoseconds - first.price_femtoseconds, first.bytes - second.bytes
    if byte_price <= 0 or scale <= 0:
        raise ValueError("the first of two points must be the faster one, and the second save fewer bytes")
    common = math.gcd(byte_price, scale)
    return byte_price // common, scale // common


def lattice_walk(solver: CutSolver, first: Point, second: Point) -> Iterator[Point]:
    """Minimum cuts at the critical price of two neighbours on the frontier, each on the line between them.

    From the smallest sink side to the largest, one strongly connected component of the residual graph at a time: of
    those whose predecessors are all there, the one with the latest value in the joint graph, so that late values
    change first. Neither price nor bytes need be monotone, neither neighbour need be among the cuts, and a step may
    change only what is recomputed for nothing: then it saves what the one before saves.
    """
    byte_price, scale = critical_price(first, second)
    cut, residual = solver.minimum_cut_and_residual(byte_price, scale)
    if not cut.value == first.cost(byte_price, scale) == second.cost(byte_price, scale):
        raise ValueError("no neighbours on the frontier: another cut costs less at their critical price")
    # No arc with room may enter the sink's side, so a vertex comes after all that lead to it, and what the source
    # reaches never does.
    never = nx.descendants(residual, SOURCE) | {SOURCE}
    components = nx.condensation(residual.subgraph(set(residual) - cut.sink_side - never))
    members = components.nodes(data="members")

    def latest_first(component: int) -> tuple[int, int]:
        position, port = max(members[component])
        return -position, -port

    sink_side = set(cut.sink_side)
    yield _on_line(solver.network, sink_side, cut.value, byte_price, scale)
    for component in nx.lexicographical_topological_sort(components, latest_first):
        sink_side |= members[component]
        yield _on_line(solver.network, sink_side, cut.value, byte_price, scale)


def _total(network: FlowNetwork, attribute: str) -> int:
    return sum(amount for _, _, amount in network.graph.edges(data=attribute, default=0))


def _width(first: Point, second: Point) -> int:
    """How much room two vertices leave, in femtoseconds times bytes: no unit matters more than the other."""
    return (second.price_femtoseconds - first.price_femtoseconds) * (first.bytes - second.bytes)


def _vertex_at(solver: CutSolver, byte_price: int, scale: int, ties: int) -> Point:
    """Of all cuts that are minimum at byte_price / scale the one of fewest bytes: an end of its edge, so a vertex.

    `ties` exceeds the bytes of any cut, so that one byte more never outweighs a difference in cost.
    """
    cut = solver.minimum_cut(byte_price * ties + 1, scale=scale * ties)
    return _measure(solver.network, cut.sink_side)


def _measure(network: FlowNetwork, sink_side: Collection[Vertex]) -> Point:
    """What a cut costs, added up from the network alone."""
    price = count_bytes = 0
    for tail, head, arc in network.graph.edges(data=True):
        if head in sink_side and tail not in sink_side:
            if "capacity" not in arc:
                raise InvalidPlan(f"the cut separates {tail} from {head}, which is forbidden")
            price += arc["capacity"]
            count_bytes += arc.get("bytes", 0)
    side = frozenset(sink_side)
    return Point(price, count_bytes, tuple(Cut(price, side).saved()), side)


def _on_line(network: FlowNetwork, sink_side: set[Vertex], least: int, byte_price: int, scale: int) -> Point:
    """The point of a sink side that must be a minimum cut at this price."""
    point = _measure(network, sink_side)
    if point.cost(byte_price, scale) != least:
        raise InvalidPlan(f"the cut costs {point.cost(byte_price, scale)}, a minimum cut {least}: it is none")
    return point
