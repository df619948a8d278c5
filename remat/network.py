"""The flow network whose minimum cut is the cheapest plan.

For each value v that the forward can compute there is an arc (v, IN) -> (v, OUT) with the price of saving v as
its capacity, and an arc SOURCE -> (v, IN) with the price of recomputing it. (v, OUT) -> (u, IN) is infinite for
each use of v by u, (v, OUT) -> SINK where the backward itself reads v. A cut of finite capacity is then exactly a
plan: what lies on the sink's side is available in the backward, saved where the cut separates IN from OUT,
recomputed where the cut separates it from the source. Each saved and each recomputed value is paid once.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch import fx

from remat import ops
from remat.costs import saved_bytes
from remat.errors import UnsatisfiableCut
from remat.joint import JointGraph
from remat.rules import Rules


class Port(enum.IntEnum):
    """The two sides of a value, and the two ends of the network. An int: its hash is the same in every process."""

    IN = 0
    OUT = 1
    SOURCE = 2
    SINK = 3


Vertex = tuple[int, Port]
SOURCE: Vertex = (-1, Port.SOURCE)
SINK: Vertex = (-1, Port.SINK)
Price = Callable[[fx.Node], int]


@dataclass(frozen=True, eq=False)
class FlowNetwork:
    """A networkx.DiGraph over (position in the joint graph, port).

    Arcs carry `reason`, and `capacity` if finite; those inside a value carry the `bytes` that saving it keeps.
    """

    joint: JointGraph
    graph: nx.DiGraph

    def node(self, vertex: Vertex) -> fx.Node:
        """The value that a vertex belongs to."""
        return self.joint.nodes[vertex[0]]

    def conflict(self) -> list[tuple[Vertex, Vertex, str]]:
        """A path of infinite arcs from source to sink, as (tail, head, reason); empty if a finite cut exists."""
        came_from: dict[Vertex, Vertex] = {}
        pending = deque([SOURCE])
        while pending and SINK not in came_from:
            tail = pending.popleft()
            for head, arc in self.graph[tail].items():
                if "capacity" not in arc and head not in came_from:
                    came_from[head] = tail
                    pending.append(head)
        path: list[tuple[Vertex, Vertex, str]] = []
        head = SINK
        while head in came_from:
            tail = came_from[head]
            path.append((tail, head, self.graph[tail][head]["reason"]))
            head = tail
        return path[::-1]


def needed_values(joint: JointGraph) -> frozenset[fx.Node]:
    """Values that could be on the sink's side: what the backward reads, and what that is computed from."""
    return frozenset(joint.ancestors(list(joint.needed_by_backward)))


def build(joint: JointGraph, rules: Rules, save_price: Price, recompute_price: Price) -> FlowNetwork:
    """Make the network. Prices are integers >= 0; a value that no rule forbids has a finite arc for each."""
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    needed = needed_values(joint)
    read_by_backward = set(joint.needed_by_backward)
    for node in joint.nodes:
        if node not in needed:
            continue
        inside, outside = (joint.index[node], Port.IN), (joint.index[node], Port.OUT)
        no_recompute = rules.no_recompute.get(node) or rules.unwise_recompute.get(node)
        no_save = rules.no_save.get(node) or rules.unwise_save.get(node)
        _arc(graph, SOURCE, inside, no_recompute, recompute_price(node), "recompute")
        _arc(graph, inside, outside, no_save, save_price(node), "save")
        graph[inside][outside]["bytes"] = saved_bytes(node)
        for user in node.users:
            if user in needed and user not in joint.tangent_closure:
                graph.add_edge(outside, (joint.index[user], Port.IN), reason="used by")
        if node in read_by_backward:
            graph.add_edge(outside, SINK, reason="read by the backward")
    return FlowNetwork(joint, graph)


def _arc(graph: nx.DiGraph, tail: Vertex, head: Vertex, forbidden: str | None, price: int, verb: str) -> None:
    if forbidden:
        graph.add_edge(tail, head, reason=f"may not {verb}: {forbidden}")
    else:
        graph.add_edge(tail, head, capacity=price, reason=f"price to {verb}")


def explain_conflict(network: FlowNetwork, path: list[tuple[Vertex, Vertex, str]]) -> UnsatisfiableCut:
    """Tell an infinite path as a story about nodes, each with the user's source line."""
    told: dict[int, list[str]] = {}
    for tail, head, reason in path:
        if head == SINK:
            told.setdefault(tail[0], []).append(reason)
        elif reason.startswith("used by"):
            told.setdefault(head[0], []).append(f"needs {network.node(tail).name}")
        else:
            told.setdefault(head[0], []).append(reason)
    lines = []
    for position, reasons in told.items():
        node = network.joint.nodes[position]
        source = ops.user_source(node)
        lines.append(f"  {node.name} ({ops.name(node)}): {'; '.join(reasons)}")
        lines += [f"      {source}"] if source else []
    return UnsatisfiableCut(
        "the backward needs values that may be neither saved nor recomputed:\n" + "\n".join(lines)
    )


def as_data(network: FlowNetwork) -> list[dict[str, Any]]:
    """The arcs as plain data, for a dump."""

    def label(vertex: Vertex) -> str:
        return vertex[1].name if vertex in (SOURCE, SINK) else f"{network.node(vertex).name}.{vertex[1].name}"

    return [
        {"from": label(tail), "to": label(head), "capacity": arc.get("capacity"), "reason": arc["reason"]}
        for tail, head, arc in network.graph.edges(data=True)
    ]
