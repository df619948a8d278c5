"""Maximum flow on plain arrays: Dinic's algorithm with Python's integers, which never overflow.

networkx's solvers stay the reference (tests compare values and cuts); a plan needs several cuts of one network at
different prices, and on the 12-layer GPT-2 five of them took 0.8 s here, under a profiler, against 3.4 s with
networkx's shortest_augmenting_path.

Source: E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Arcs:
    """A network's structure: arc 2k goes forward, arc 2k+1 is its reverse; `leaving[v]` lists the arcs out of v."""

    heads: list[int]
    leaving: list[list[int]]

    @classmethod
    def build(cls, size: int, pairs: Sequence[tuple[int, int]]) -> Arcs:
        """Number the arcs in the order given."""
        arcs = cls([], [[] for _ in range(size)])
        for tail, head in pairs:
            arcs.leaving[tail].append(len(arcs.heads))
            arcs.heads.append(head)
            arcs.leaving[head].append(len(arcs.heads))
            arcs.heads.append(tail)
        return arcs


def maximum_flow(arcs: Arcs, capacities: Sequence[int | None], source: int, sink: int) -> tuple[int, list[int]]:
    """Value of a maximum flow and the residual capacity of every arc and reverse arc.

    `capacities` has one entry for each pair given to Arcs.build; None is infinite. The caller makes sure that no
    path of infinite arcs leads from source to sink.
    """
    infinite = 1 + sum(capacity for capacity in capacities if capacity is not None)
    residual: list[int] = []
    for capacity in capacities:
        residual += (infinite if capacity is None else capacity, 0)
    value = 0
    while True:
        distance = _distances(arcs, residual, source, sink)
        if distance[source] < 0:
            return value, residual
        value += _blocking_flow(arcs, residual, distance, source, sink)


def _distances(arcs: Arcs, residual: list[int], source: int, sink: int) -> list[int]:
    """Arcs to the sink in the residual network, -1 where it cannot be reached; stops at the source's distance."""
    heads, leaving = arcs.heads, arcs.leaving
    distance = [-1] * len(leaving)
    distance[sink] = 0
    pending = deque([sink])
    while pending:
        head = pending.popleft()
        if head == source:
            break
        step = distance[head] + 1
        for arc in leaving[head]:
            tail = heads[arc]
            if distance[tail] < 0 and residual[arc ^ 1] > 0:
                distance[tail] = step
                pending.append(tail)
    return distance


def _blocking_flow(arcs: Arcs, residual: list[int], distance: list[int], source: int, sink: int) -> int:
    """Push along shortest paths until none is left; each vertex remembers the arc it tried last."""
    heads, leaving = arcs.heads, arcs.leaving
    tried = [0] * len(leaving)
    path: list[int] = []
    vertex, pushed = source, 0
    while True:
        if vertex == sink:
            amount = min(residual[arc] for arc in path)
            pushed += amount
            kept = len(path)
            for position in range(len(path) - 1, -1, -1):
                arc = path[position]
                residual[arc] -= amount
                residual[arc ^ 1] += amount
                if not residual[arc]:
                    kept = position
            vertex = heads[path[kept] ^ 1]
            del path[kept:]
            continue
        out, step, position = leaving[vertex], distance[vertex] - 1, tried[vertex]
        while position < len(out):
            arc = out[position]
            if residual[arc] > 0 and distance[heads[arc]] == step:
                break
            position += 1
        tried[vertex] = position
        if position < len(out):
            path.append(out[position])
            vertex = heads[out[position]]
        elif vertex == source:
            return pushed
        else:
            vertex = heads[path.pop() ^ 1]
            tried[vertex] += 1


def sink_side(arcs: Arcs, residual: list[int], sink: int) -> list[bool]:
    """Which vertices still reach the sink: the smallest sink side of all minimum cuts, whatever flow was found."""
    reaches = [False] * len(arcs.leaving)
    reaches[sink] = True
    pending = [sink]
    while pending:
        head = pending.pop()
        for arc in arcs.leaving[head]:
            tail = arcs.heads[arc]
            if not reaches[tail] and residual[arc ^ 1] > 0:
                reaches[tail] = True
                pending.append(tail)
    return reaches
