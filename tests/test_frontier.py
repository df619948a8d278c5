"""The frontier against the hull of all cuts, and the walk between two vertices against all minimum cuts.

Drawn networks are small enough to list every cut and have small integers as prices, so that ties, points on one line
and arcs that cost nothing are common; real joint graphs are compared with all plans, or with networkx.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import networkx as nx
import pytest
import torch
from torch import Tensor

from remat.costs import saved_bytes
from remat.errors import UnsatisfiableCut
from remat.frontier import Point, convex_frontier, critical_price, lattice_walk
from remat.joint import JointGraph
from remat.mincut import Cut, CutSolver
from remat.network import SINK, SOURCE, FlowNetwork, Port, Vertex
from remat.plans import Planner
from tests import checks, graphs

ENUMERABLE = ["chain", "loss", "sdpa", "convnet", "dropout", "multi_output", "views", "outputs", "counter", "constants"]
DRAWS = 60
VALUES = 6
LAYERS = 5


def drawn_network(seed: int) -> FlowNetwork:
    """A random network of the shape that network.build makes, without a joint graph; some have no finite cut."""
    draw = random.Random(seed)
    most = draw.choice((3, 6, 40))
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for value in range(VALUES):
        again = {} if draw.random() < 0.1 else {"capacity": draw.randrange(most)}
        save = {} if draw.random() < 0.1 else {"capacity": draw.randrange(1 + most // 3)}
        graph.add_edge(SOURCE, (value, Port.IN), reason="recompute", **again)
        graph.add_edge((value, Port.IN), (value, Port.OUT), reason="save", bytes=draw.randrange(most), **save)
        for user in range(value + 1, VALUES):
            if draw.random() < 0.4:
                graph.add_edge((value, Port.OUT), (user, Port.IN), reason="used by")
        if value == VALUES - 1 or draw.random() < 0.4:
            graph.add_edge((value, Port.OUT), SINK, reason="read by the backward")
    return FlowNetwork(cast(JointGraph, None), graph)


def all_finite_cuts(network: FlowNetwork) -> dict[frozenset[Vertex], tuple[int, int]]:
    """Price and bytes of every sink side that cuts no infinite arc."""
    inner = [vertex for vertex in network.graph if vertex not in (SOURCE, SINK)]
    cuts = {}
    for chosen in itertools.product((False, True), repeat=len(inner)):
        side = {SINK, *itertools.compress(inner, chosen)}
        arcs = [arc for tail, head, arc in network.graph.edges(data=True) if head in side and tail not in side]
        if all("capacity" in arc for arc in arcs):
            cuts[frozenset(side)] = (sum(a["capacity"] for a in arcs), sum(a.get("bytes", 0) for a in arcs))
    return cuts


@functools.cache
def drawn(seed: int) -> tuple[CutSolver, dict[frozenset[Vertex], tuple[int, int]]]:
    network = drawn_network(seed)
    return CutSolver(network), all_finite_cuts(network)


def lower_left_hull(points: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Andrew's monotone chain, from the fastest point to the smallest; of points on one line the ends only."""
    hull: list[tuple[int, int]] = []
    for price, size in sorted(set(points)):
        if hull and size >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (price_0, size_0), (price_1, size_1) = hull[-2:]
            if (price_1 - price_0) * (size - size_0) - (size_1 - size_0) * (price - price_0) > 0:
                break
            hull.pop()
        hull.append((price, size))
    return hull


def costs_of(points: Iterable[Point]) -> list[tuple[int, int]]:
    return [(point.price_femtoseconds, point.bytes) for point in points]


def cuts_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each cut from here on adds an entry."""
    made: list[int] = []
    certify = CutSolver._certify

    def counted(solver: CutSolver, cut: Cut, capacities: list[int | None]) -> None:
        made.append(cut.value)
        certify(solver, cut, capacities)

    monkeypatch.setattr(CutSolver, "_certify", counted)
    return made


def networkx_value(network: FlowNetwork, byte_price: int, scale: int) -> int:
    priced: nx.DiGraph = nx.DiGraph()
    for tail, head, arc in network.graph.edges(data=True):
        finite = "capacity" in arc
        known = {"capacity": scale * arc["capacity"] + byte_price * arc.get("bytes", 0)} if finite else {}
        priced.add_edge(tail, head, **known)
    return nx.minimum_cut_value(priced, SOURCE, SINK)


# --- all vertices, and nothing else ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(DRAWS))
def test_vertices_are_those_of_the_hull_of_all_cuts(seed: int, monkeypatch: pytest.MonkeyPatch):
    solver, cuts = drawn(seed)
    if not cuts:
        with pytest.raises(UnsatisfiableCut):
            refuse_without_a_story(solver, monkeypatch)
        return
    made = cuts_made(monkeypatch)
    vertices = convex_frontier(solver)
    assert costs_of(vertices) == lower_left_hull(cuts.values())
    assert len(made) == max(2, 2 * len(vertices) - 1)
    for vertex in vertices:
        assert cuts[vertex.sink_side] == (vertex.price_femtoseconds, vertex.bytes)
        same = [side for side, cost in cuts.items() if cost == (vertex.price_femtoseconds, vertex.bytes)]
        assert all(vertex.sink_side <= side for side in same)  # of equals the smallest, so that it is unique


def refuse_without_a_story(solver: CutSolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drawn network has no nodes to tell of."""
    monkeypatch.setattr("remat.mincut.explain_conflict", lambda network, path: UnsatisfiableCut(str(path)))
    convex_frontier(solver)


def test_draws_hold_what_is_hard():
    frontiers = [lower_left_hull(cuts.values()) for _, cuts in map(drawn, range(DRAWS)) if cuts]
    on_a_line = sum(
        len({cost for cost in cuts.values() if between(cost, a, b)}) > 2
        for _, cuts in map(drawn, range(DRAWS))
        for a, b in pairwise(lower_left_hull(cuts.values()))
    )
    assert len(frontiers) > DRAWS // 2
    assert any(len(frontier) == 1 for frontier in frontiers)
    assert sum(len(frontier) > 3 for frontier in frontiers) > 5
    assert on_a_line > 3


def between(cost: tuple[int, int], first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether a point lies on the line through two others."""
    return (cost[0] - first[0]) * (second[1] - first[1]) == (cost[1] - first[1]) * (second[0] - first[0])


@pytest.mark.parametrize("name", ENUMERABLE)
def test_vertices_are_those_of_the_hull_of_all_plans(name: str):
    planner = graphs.planner(name)
    costs = planner.costs
    plans = {
        (choice.cost(costs.save_price, costs.recompute_price), sum(saved_bytes(node) for node in choice.saved))
        for choice in checks.all_choices(planner.joint, planner.rules)
    }
    assert costs_of(convex_frontier(CutSolver(planner.network))) == lower_left_hull(plans)


@pytest.mark.parametrize("name", graphs.MODELS)
def test_frontier_is_strictly_convex_and_its_vertices_are_plans(name: str, monkeypatch: pytest.MonkeyPatch):
    planner = graphs.planner(name)
    made = cuts_made(monkeypatch)
    vertices = convex_frontier(CutSolver(planner.network))
    assert len(made) <= 2 * len(vertices) + 2
    assert all(type(number) is int for cost in costs_of(vertices) for number in cost)
    assert lower_left_hull(costs_of(vertices)) == costs_of(vertices)
    for vertex in vertices:
        check_plan(planner, vertex)


@pytest.mark.parametrize("name", graphs.MODELS)
def test_networkx_finds_no_cut_below_the_frontier(name: str):
    planner = graphs.planner(name)
    vertices = convex_frontier(CutSolver(planner.network))
    critical = [critical_price(*pair) for pair in pairwise(vertices)]
    for byte_price, scale in [(0, 1), (10_000, 1), (1_000_001, 3), (10**18, 1), *critical[:2], *critical[-1:]]:
        least = min(vertex.cost(byte_price, scale) for vertex in vertices)
        assert least == networkx_value(planner.network, byte_price, scale)


def check_plan(planner: Planner, point: Point) -> None:
    """A cut that costs what it says, and what its values cost one by one."""
    checks.check_cut(planner.network, planner.rules, Cut(point.price_femtoseconds, point.sink_side))
    saved = [planner.joint.nodes[position] for position in point.saved]
    again = [planner.network.node(vertex) for vertex in point.sink_side if vertex[1] is Port.IN]
    assert list(point.saved) == sorted(point.saved)
    assert point.bytes == sum(saved_bytes(node) for node in saved)
    price = sum(map(planner.costs.save_price, saved)) + sum(map(planner.costs.recompute_price, again))
    assert point.price_femtoseconds == price


def test_a_limit_keeps_both_ends_and_true_vertices():
    solver = CutSolver(graphs.planner("residual").network)
    everything = convex_frontier(solver)
    assert len(everything) > 5
    for most in range(2, len(everything) + 1):
        some = convex_frontier(solver, most)
        assert len(some) == most
        assert {some[0], some[-1]} == {everything[0], everything[-1]}
        assert [vertex for vertex in everything if vertex in some] == some


def test_a_limit_looks_into_the_widest_gap_first():
    looked_into = set()
    for name in graphs.MODELS:
        solver = CutSolver(graphs.planner(name).network)
        everything = convex_frontier(solver)
        three = convex_frontier(solver, 3)
        if len(everything) > 4 and not set(three[1:2]) & {everything[1], everything[-2]}:  # both gaps hold a vertex
            room = [(b.price_femtoseconds - a.price_femtoseconds) * (a.bytes - b.bytes) for a, b in pairwise(three)]
            (fourth,) = set(convex_frontier(solver, 4)) - set(three)
            looked_into.add(fourth.bytes < three[1].bytes)
            assert (fourth.bytes < three[1].bytes) == (room[1] > room[0])
    assert looked_into == {False, True}


def test_a_network_with_one_best_plan_has_one_vertex(monkeypatch: pytest.MonkeyPatch):
    made = cuts_made(monkeypatch)
    assert len(convex_frontier(CutSolver(graphs.planner("snapshot").network))) == 1
    assert len(made) == 2


# --- between two vertices ----------------------------------------------------------------------------------------


def check_nested(steps: list[Point]) -> None:
    for before, after in pairwise(steps):
        assert before.sink_side < after.sink_side


@pytest.mark.parametrize("seed", range(DRAWS))
def test_walk_is_a_longest_chain_of_all_minimum_cuts(seed: int):
    solver, cuts = drawn(seed)
    for first, second in pairwise(convex_frontier(solver) if cuts else ()):
        byte_price, scale = critical_price(first, second)
        least = first.cost(byte_price, scale)
        minimum = [side for side, (price, size) in cuts.items() if scale * price + byte_price * size == least]
        assert least == min(scale * price + byte_price * size for price, size in cuts.values())
        steps = list(lattice_walk(solver, first, second))
        check_nested(steps)
        assert steps[0].sink_side == frozenset.intersection(*minimum)
        assert steps[-1].sink_side == frozenset.union(*minimum)
        assert all(cuts[step.sink_side] == (step.price_femtoseconds, step.bytes) for step in steps)
        assert all(step.sink_side in minimum for step in steps)
        for before, after in pairwise(steps):
            assert not [side for side in minimum if before.sink_side < side < after.sink_side]
            # of all that could be added next, what holds the latest value
            next_ones = [side - before.sink_side for side in minimum if before.sink_side < side]
            smallest = [side for side in next_ones if not any(other < side for other in next_ones)]
            assert after.sink_side - before.sink_side == max(smallest, key=max)


@pytest.mark.parametrize("name", graphs.MODELS)
def test_every_step_is_a_plan_on_the_line_between_its_neighbours(name: str):
    planner = graphs.planner(name)
    solver = CutSolver(planner.network)
    for first, second in pairwise(convex_frontier(solver)):
        byte_price, scale = critical_price(first, second)
        least = networkx_value(planner.network, byte_price, scale)
        steps = list(lattice_walk(solver, first, second))
        check_nested(steps)
        assert steps[0].sink_side <= first.sink_side & second.sink_side
        assert first.sink_side | second.sink_side <= steps[-1].sink_side
        for step in steps:
            assert step.cost(byte_price, scale) == least
            assert second.bytes <= step.bytes <= first.bytes
            check_plan(planner, step)


def layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    for _ in range(LAYERS):
        x = x + torch.tanh(torch.exp(-x @ up)) @ down
    return x


@pytest.fixture(scope="module")
def equal_layers() -> Planner:
    """A chain of layers that all cost the same, and so change at one price."""
    return graphs.planner_of(graphs.joint_of(layers, graphs.leaf(16, 4), graphs.leaf(4, 64), graphs.leaf(64, 4)))


def test_equal_layers_change_one_by_one_the_last_one_first(equal_layers: Planner):
    solver = CutSolver(equal_layers.network)
    walks = [list(lattice_walk(solver, *pair)) for pair in pairwise(convex_frontier(solver))]
    longest = max(walks, key=len)
    assert len(longest) > LAYERS
    given_up = [set(before.saved) - set(after.saved) for before, after in pairwise(longest)]
    assert all(given_up)
    assert [max(positions) for positions in given_up] == sorted(map(max, given_up), reverse=True)


def test_walk_refuses_points_that_are_no_neighbours_on_the_frontier():
    solver = CutSolver(graphs.planner("residual").network)
    first, second, third, *_ = convex_frontier(solver)
    with pytest.raises(ValueError, match="no neighbours"):
        next(lattice_walk(solver, first, third))
    for wrong in ((second, first), (first, first)):
        with pytest.raises(ValueError, match="the faster one"):
            next(lattice_walk(solver, *wrong))


def test_walk_is_the_same_whatever_order_the_arcs_are_in():
    for seed in range(DRAWS):
        solver, cuts = drawn(seed)
        graph = solver.network.graph
        shuffled: nx.DiGraph = nx.DiGraph()
        shuffled.add_nodes_from(random.Random(seed).sample(list(graph), len(graph)))
        shuffled.add_edges_from(random.Random(seed).sample(list(graph.edges(data=True)), graph.number_of_edges()))
        other = CutSolver(FlowNetwork(solver.network.joint, shuffled))
        vertices = convex_frontier(solver) if cuts else []
        assert vertices == (convex_frontier(other) if cuts else [])
        for pair in pairwise(vertices):
            assert list(lattice_walk(solver, *pair)) == list(lattice_walk(other, *pair))
