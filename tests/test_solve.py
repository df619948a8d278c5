"""The planner for plain graphs: legal, within the budget, the same each time, and the optimum where it can be told."""

import heapq
import random

import pytest

from remat.anneal import Annealing, Cooling
from remat.errors import BudgetUnreachable
from remat.ordering import Slides, order_within
from remat.problem import Problem, single_valued
from remat.schedule import Schedule
from remat.solve import schedule

Graph = tuple[list[int], list[int], list[tuple[int, int]], list[int]]


def layered_graph(nodes: int, seed: int, width: int = 4) -> Graph:
    """A random graph like the public ones: layers, edges to the next layers, one sink, sizes and costs of any kind."""
    rng = random.Random(seed)
    edges: set[tuple[int, int]] = set()
    for node in range(1, nodes - 1):
        reach = range(max(0, node - 3 * width), node)
        edges |= {(tail, node) for tail in rng.sample(reach, min(len(reach), rng.randint(1, 3)))}
    read = {tail for tail, _ in edges}
    edges |= {(node, nodes - 1) for node in range(nodes - 1) if node not in read}
    size = [rng.randint(1, 60) for _ in range(nodes)]
    cost = [rng.randint(0, 40) for _ in range(nodes)]
    return size, cost, sorted(edges), list(range(nodes))


def training_graph(layers: int, seed: int) -> Graph:
    """A chain forward, and backward nodes that read the chain in reverse."""
    rng = random.Random(seed)
    nodes = 2 * layers
    edges = [(node, node + 1) for node in range(nodes - 1)]
    edges += [(layer, nodes - 1 - layer) for layer in range(layers - 1)]
    size = [rng.randint(5, 9)] * layers + [3] * layers
    return size, [rng.randint(1, 5) for _ in range(nodes)], edges, list(range(nodes))


def optimum(problem: Problem, budget: int) -> int | None:
    """The least recompute cost within a budget, by Dijkstra over (ever run, alive now); None if none fits.

    Dropping is free and may happen before any step; a result that was just computed stays for the step itself.
    """
    count = len(problem.size)
    reads = [sum(1 << value for value in values) for values in problem.reads]
    weight = [sum(problem.size[node] for node in range(count) if mask >> node & 1) for mask in range(1 << count)]
    everything = (1 << count) - 1
    best = {(0, 0): 0}
    heap = [(0, 0, 0)]
    while heap:
        cost, done, alive = heapq.heappop(heap)
        if best[done, alive] < cost:
            continue
        if done == everything:
            return cost - problem.baseline_cost
        following = [(cost, done, alive & ~(1 << node)) for node in range(count) if alive >> node & 1]
        for node in range(count):
            after = alive | 1 << node
            if reads[node] & ~alive == 0 and after != alive and weight[after] <= budget:
                following.append((cost + problem.cost[node], done | 1 << node, after))
        for price, ran, left in following:
            if price < best.get((ran, left), price + 1):
                best[ran, left] = price
                heapq.heappush(heap, (price, ran, left))
    return None


@pytest.mark.parametrize("seed", range(8))
def test_tiny_graphs_reach_the_optimum(seed: int) -> None:
    graph = layered_graph(7, seed, width=2) if seed % 2 else training_graph(4, seed)
    problem = single_valued(*graph)
    peak = problem.peak(problem.order)
    for share in (0.95, 0.85, 0.75):
        budget = int(share * peak)
        best = optimum(problem, budget)
        if best is None:
            with pytest.raises(BudgetUnreachable, match="smallest peak"):
                schedule(*graph, budget, effort=1)
            continue
        sequence = schedule(*graph, budget, effort=1)
        assert problem.why_illegal(sequence) is None
        assert problem.peak(sequence) <= budget
        assert problem.recompute_cost(sequence) == best


@pytest.mark.parametrize(("nodes", "share"), [(30, 0.8), (80, 0.85)])
def test_random_graphs_are_legal_and_within_the_budget(nodes: int, share: float) -> None:
    graph = layered_graph(nodes, nodes)
    problem = single_valued(*graph)
    budget = int(share * problem.peak(problem.order))
    sequence = schedule(*graph, budget, effort=1)
    assert problem.why_illegal(sequence) is None
    assert problem.peak(sequence) <= budget


def test_a_training_chain_recomputes() -> None:
    graph = training_graph(20, 0)
    problem = single_valued(*graph)
    budget = int(0.5 * problem.peak(problem.order))
    sequence = schedule(*graph, budget, effort=1)
    assert problem.why_illegal(sequence) is None
    assert problem.peak(sequence) <= budget
    assert 0 < problem.recompute_cost(sequence) < problem.baseline_cost


def test_the_same_each_time() -> None:
    graph = training_graph(12, 1)
    budget = int(0.6 * single_valued(*graph).peak(graph[3]))
    assert schedule(*graph, budget, effort=1) == schedule(*graph, budget, effort=1)


def test_a_budget_that_holds_everything_costs_nothing() -> None:
    graph = layered_graph(20, 3)
    assert schedule(*graph, sum(graph[0])) == graph[3]
    assert schedule([], [], [], [], 0) == []


def test_a_node_that_does_not_fit_is_told() -> None:
    with pytest.raises(BudgetUnreachable, match=r"smallest peak is 3$"):
        schedule([1, 2], [1, 1], [(0, 1)], [0, 1], 2, effort=1)


@pytest.mark.parametrize("order", [[1, 0], [0], [0, 0, 1]])
def test_an_illegal_order_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="not an order of all nodes"):
        schedule([1, 2], [1, 1], [(0, 1)], order, 9)


@pytest.mark.parametrize("seed", range(3))
def test_slides_tell_what_they_change(seed: int) -> None:
    graph = layered_graph(40, seed)
    problem = single_valued(*graph)
    budget = int(0.4 * problem.peak(problem.order))
    annealing = Annealing(problem, problem.order, budget, 0.5, seed)
    annealing.run(1500, Cooling())
    changed, slides, rng = annealing.schedule, annealing.slides, random.Random(seed)
    assert len(changed.order) > 40  # with nodes that run again
    for _ in range(300):
        event = int(changed.order[rng.randrange(len(changed.order))])
        low, high = slides.window(event)
        changes, before, to = slides.changes(event, low, high), slides.excess, rng.randint(low, high)
        assert changes[int(changed.position[event]) - low] == 0
        slides.move(event, to)
        assert changed.alive.tolist() == problem.profile(changed.sequence())
        assert slides.excess - before == changes[to - low]
    assert problem.why_illegal(changed.sequence()) is None


def test_annealing_keeps_its_books() -> None:
    graph = training_graph(15, 2)
    problem = single_valued(*graph)
    annealing = Annealing(problem, problem.order, int(0.6 * problem.peak(problem.order)), 0.05, 0)
    annealing.run(6000, Cooling())
    sequence = annealing.schedule.sequence()
    assert annealing.schedule.alive.tolist() == problem.profile(sequence)
    assert annealing.schedule.cost == problem.recompute_cost(sequence)
    assert annealing.excess == annealing.slides.excess
    assert annealing.best is not None
    assert problem.recompute_cost(annealing.best[1]) == annealing.best[0]


def test_an_order_with_less_memory_is_found() -> None:
    # Two chains that meet: side by side both big values are alive, one after the other only one is.
    size, edges = [9, 9, 1, 1, 1], [(0, 2), (1, 3), (2, 4), (3, 4)]
    problem = single_valued(size, [1] * 5, edges, [0, 1, 2, 3, 4])
    order, excess = order_within(problem, problem.order, 11, 500, 1.0, 0)
    assert excess == 0
    assert problem.peak(order) <= 11
    assert Schedule(problem, order).peak == problem.peak(order)
    assert Slides(Schedule(problem, order), 11).excess == 0
