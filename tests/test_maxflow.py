"""The flow solver against networkx and against all cuts: values, cuts, and the flow itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import pytest
from networkx.algorithms import flow as nx_flow

from remat.maxflow import Arcs, maximum_flow, sink_side

Pair = tuple[int, int]
Capacity = int | None
SOLVERS = [nx_flow.preflow_push, nx_flow.edmonds_karp, nx_flow.dinitz, nx_flow.boykov_kolmogorov]


@dataclass(frozen=True)
class Network:
    """Vertex 0 is the source, the last one the sink."""

    size: int
    pairs: list[Pair]
    capacities: list[Capacity]

    @property
    def sink(self) -> int:
        return self.size - 1

    def digraph(self) -> nx.DiGraph:
        graph: nx.DiGraph = nx.DiGraph()
        graph.add_nodes_from(range(self.size))
        for (tail, head), capacity in zip(self.pairs, self.capacities, strict=True):
            if capacity is None:
                graph.add_edge(tail, head)
            else:
                graph.add_edge(tail, head, capacity=capacity)
        return graph

    def has_infinite_path(self) -> bool:
        graph: nx.DiGraph = nx.DiGraph()
        graph.add_nodes_from(range(self.size))
        graph.add_edges_from(p for p, c in zip(self.pairs, self.capacities, strict=True) if c is None)
        return nx.has_path(graph, 0, self.sink)

    def cut_cost(self, sink_vertices: set[int]) -> int | None:
        """Capacity from outside into a set of vertices; None if infinite."""
        crossing = [
            capacity
            for (tail, head), capacity in zip(self.pairs, self.capacities, strict=True)
            if tail not in sink_vertices and head in sink_vertices
        ]
        return None if None in crossing else sum(c for c in crossing if c is not None)


def random_network(seed: int, size: int, density: float, largest: int, infinite: float = 0.0) -> Network:
    """Each ordered pair of vertices, cycles included, is an arc with this probability; capacities from 0."""
    draw = random.Random(seed)
    while True:
        pairs = [p for p in itertools.permutations(range(size), 2) if draw.random() < density]
        draw.shuffle(pairs)
        capacities = [None if draw.random() < infinite else draw.randrange(largest + 1) for _ in pairs]
        network = Network(size, pairs, capacities)
        if not network.has_infinite_path():
            return network


def solve(network: Network) -> tuple[int, list[int], Arcs]:
    arcs = Arcs.build(network.size, network.pairs)
    value, residual = maximum_flow(arcs, network.capacities, 0, network.sink)
    return value, residual, arcs


def check_flow(network: Network, value: int, residual: Sequence[int]) -> None:
    """The residual capacities describe a flow of this value: within capacity, conserved everywhere in between."""
    balance = [0] * network.size
    for number, ((tail, head), capacity) in enumerate(zip(network.pairs, network.capacities, strict=True)):
        carried = residual[2 * number + 1]
        assert carried >= 0
        assert residual[2 * number] >= 0
        if capacity is not None:
            assert carried + residual[2 * number] == capacity
        balance[tail] -= carried
        balance[head] += carried
    assert balance[0] == -value
    assert balance[network.sink] == value
    assert not any(balance[1:-1])


def check_against_networkx(network: Network, solver: object) -> None:
    value, residual, arcs = solve(network)
    check_flow(network, value, residual)
    graph = network.digraph()
    assert value == nx.maximum_flow_value(graph, 0, network.sink, flow_func=solver)
    mine = sink_side(arcs, residual, network.sink)
    inside = {vertex for vertex in range(network.size) if mine[vertex]}
    assert network.cut_cost(inside) == value
    # The smallest sink side is what still reaches the sink in the residual network of any maximum flow.
    theirs = nx_flow.edmonds_karp(graph, 0, network.sink)
    reaching: nx.DiGraph = nx.DiGraph()
    reaching.add_nodes_from(theirs)
    reaching.add_edges_from((t, h) for t, h, arc in theirs.edges(data=True) if arc["flow"] < arc["capacity"])
    assert inside == nx.ancestors(reaching, network.sink) | {network.sink}


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.__name__)
@pytest.mark.parametrize("density", [0.15, 0.4, 0.9])
def test_value_flow_and_smallest_sink_side_agree_with_networkx(solver: object, density: float):
    for seed in range(20):
        check_against_networkx(random_network(seed, 4 + seed % 9, density, 12), solver)


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.__name__)
def test_infinite_arcs_are_never_cut(solver: object):
    for seed in range(30):
        network = random_network(seed, 9, 0.3, 9, infinite=0.25)
        assert None in network.capacities
        check_against_networkx(network, solver)


def test_zero_capacities_count_as_no_arc():
    for seed in range(60):
        network = random_network(seed, 8, 0.5, 1)
        assert 0 in network.capacities
        check_against_networkx(network, nx_flow.preflow_push)
        kept = [number for number, capacity in enumerate(network.capacities) if capacity != 0]
        without = Network(8, [network.pairs[n] for n in kept], [network.capacities[n] for n in kept])
        assert solve(without)[0] == solve(network)[0]


@pytest.mark.parametrize("bits", [40, 63, 64, 200])
def test_huge_integers_stay_exact(bits: int):
    for seed in range(15):
        network = random_network(seed, 8, 0.4, 2**bits, infinite=0.1)
        check_against_networkx(network, nx_flow.edmonds_karp)
    draw = random.Random(bits)
    # One unit in 2^bits decides between two cuts: a float of 53 bits would not see it.
    base = draw.getrandbits(bits) | 1 << bits
    nearly_equal = Network(3, [(0, 1), (1, 2)], [base + 1, base])
    value, residual, arcs = solve(nearly_equal)
    assert value == base
    assert sink_side(arcs, residual, 2) == [False, False, True]
    value, residual, arcs = solve(Network(3, [(0, 1), (1, 2)], [base, base + 1]))
    assert value == base
    assert sink_side(arcs, residual, 2) == [False, True, True]


def test_value_is_the_least_over_all_cuts_of_tiny_networks():
    for seed in range(150):
        network = random_network(seed, 2 + seed % 6, 0.5, 6, infinite=0.15)
        value, residual, arcs = solve(network)
        others = range(1, network.sink)
        cuts = [
            {network.sink, *chosen}
            for count in range(network.size - 1)
            for chosen in itertools.combinations(others, count)
        ]
        costs = [cost for cost in map(network.cut_cost, cuts) if cost is not None]
        assert value == min(costs)
        # and the sink side is the intersection of the sink sides of all minimum cuts
        smallest = set.intersection(*(cut for cut in cuts if network.cut_cost(cut) == value))
        inside = {vertex for vertex, reaches in enumerate(sink_side(arcs, residual, network.sink)) if reaches}
        assert inside == smallest


def test_smallest_sink_side_does_not_depend_on_the_order_of_the_arcs():
    for seed in range(40):
        network = random_network(seed, 9, 0.4, 3)
        order = list(range(len(network.pairs)))
        random.Random(seed).shuffle(order)
        shuffled = Network(9, [network.pairs[n] for n in order], [network.capacities[n] for n in order])
        sides = []
        for given in (network, shuffled):
            _, residual, arcs = solve(given)
            sides.append(sink_side(arcs, residual, given.sink))
        assert sides[0] == sides[1]


def test_without_a_path_the_flow_is_zero_and_the_sink_alone():
    value, residual, arcs = solve(Network(4, [(0, 1), (2, 1), (3, 2)], [5, 5, None]))
    assert value == 0
    assert sink_side(arcs, residual, 3) == [False, False, False, True]


def test_parallel_and_opposite_arcs_add_up():
    value, residual, _ = solve(Network(2, [(0, 1), (0, 1), (1, 0)], [3, 4, 100]))
    assert value == 7
    assert residual[0] == residual[2] == 0


def test_arcs_can_be_solved_again_at_other_capacities():
    network = random_network(7, 10, 0.4, 50)
    arcs = Arcs.build(network.size, network.pairs)
    for factor in (1, 0, 3, 1):
        scaled = [None if capacity is None else capacity * factor for capacity in network.capacities]
        value, _ = maximum_flow(arcs, scaled, 0, network.sink)
        assert value == factor * solve(network)[0]


def test_long_chain_needs_no_recursion():
    length = 20_000
    pairs = [(vertex, vertex + 1) for vertex in range(length)]
    capacities: list[Capacity] = [None] * length
    capacities[length // 2] = 11
    value, residual, arcs = solve(Network(length + 1, pairs, capacities))
    assert value == 11
    assert sum(sink_side(arcs, residual, length)) == length - length // 2
