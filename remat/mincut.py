"""Minimum cuts of a flow network at growing prices of a saved byte, each with its certificate checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from remat.errors import InvalidPlan
from remat.maxflow import Arcs, maximum_flow, sink_side
from remat.network import SINK, SOURCE, FlowNetwork, Port, Vertex, explain_conflict


@dataclass(frozen=True)
class Cut:
    """A minimum cut: its capacity and the sink's side, which is the smallest one, so that the cut is unique.

    Among plans of equal price the smallest sink side recomputes least, and it does not depend on which maximum
    flow the solver found: plans are the same in every process.
    """

    value: int
    sink_side: frozenset[Vertex]

    def saved(self) -> list[int]:
        """Positions in the joint graph of the values that the cut saves, in order."""
        return sorted(
            position
            for position, port in self.sink_side
            if port is Port.OUT and (position, Port.IN) not in self.sink_side
        )


@dataclass(frozen=True, eq=False)
class CutSolver:
    """One network as arrays, to be cut many times. The arrays are made from the networkx graph, arc by arc."""

    network: FlowNetwork

    @cached_property
    def _vertices(self) -> list[Vertex]:
        return list(self.network.graph)

    @cached_property
    def _numbers(self) -> dict[Vertex, int]:
        return {vertex: number for number, vertex in enumerate(self._vertices)}

    @cached_property
    def _arcs(self) -> Arcs:
        pairs = [(self._numbers[tail], self._numbers[head]) for tail, head in self.network.graph.edges()]
        return Arcs.build(len(self._vertices), pairs)

    def minimum_cut(
        self, byte_price: int = 0, upto: int | None = None, byte_price_after: int = 0, scale: int = 1
    ) -> Cut:
        """Cut with `byte_price` femtoseconds added for each saved byte.

        With `upto`, values from that position of the joint graph on pay `byte_price_after` instead. `scale`
        multiplies all other femtoseconds: at byte_price / scale for a byte, exactly.
        Raises UnsatisfiableCut with the conflict told node by node where no finite cut exists.
        """
        return self._solve(byte_price, upto, byte_price_after, scale)[0]

    def minimum_cut_and_residual(self, byte_price: int, scale: int = 1) -> tuple[Cut, nx.DiGraph]:
        """The same cut, and the arcs with room left beside the maximum flow: all minimum cuts follow from them."""
        cut, room = self._solve(byte_price, None, 0, scale)
        residual: nx.DiGraph = nx.DiGraph()
        residual.add_nodes_from(self._vertices)
        for number, (tail, head) in enumerate(self.network.graph.edges()):
            if room[2 * number]:
                residual.add_edge(tail, head)
            if room[2 * number + 1]:
                residual.add_edge(head, tail)
        return cut, residual

    def _solve(self, byte_price: int, upto: int | None, byte_price_after: int, scale: int) -> tuple[Cut, list[int]]:
        """The certified cut and the room left on every arc and its reverse, numbered as in Arcs."""
        path = self.network.conflict()
        if path:
            raise explain_conflict(self.network, path)
        capacities = [
            None
            if "capacity" not in arc
            else scale * arc["capacity"]
            + arc.get("bytes", 0) * (byte_price if upto is None or tail[0] < upto else byte_price_after)
            for tail, _, arc in self.network.graph.edges(data=True)
        ]
        value, residual = maximum_flow(self._arcs, capacities, self._numbers[SOURCE], self._numbers[SINK])
        reaches = sink_side(self._arcs, residual, self._numbers[SINK])
        cut = Cut(value, frozenset(v for v, inside in zip(self._vertices, reaches, strict=True) if inside))
        self._certify(cut, capacities)
        return cut, residual

    def _certify(self, cut: Cut, capacities: list[int | None]) -> None:
        """A cut that costs what a flow carries is minimum, and the flow maximum: no trust in the solver is needed."""
        paid = 0
        for (tail, head), capacity in zip(self.network.graph.edges(), capacities, strict=True):
            if tail not in cut.sink_side and head in cut.sink_side:
                if capacity is None:
                    raise InvalidPlan(f"the cut separates {tail} from {head}, which is forbidden")
                paid += capacity
        if paid != cut.value:
            raise InvalidPlan(f"the cut costs {paid}, the flow carries {cut.value}: it is no minimum cut")
