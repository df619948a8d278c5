"""The minimum cut of real joint graphs: against networkx, against all plans, and explained where there is none."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import Tensor

from remat.costs import saved_bytes
from remat.errors import UnsatisfiableCut
from remat.mincut import CutSolver
from remat.network import SINK, SOURCE, FlowNetwork, Port, build, needed_values
from remat.plans import Planner
from remat.rules import Rules
from tests import checks, graphs

ROOT = Path(__file__).resolve().parent.parent
# Femtoseconds per byte: none, a tenth of reading it, reading it ten times, and more than everything else together.
BYTE_PRICES = [0, 10_000, 1_000_000, 10**18]
SMALL = ["chain", "loss", "sdpa", "convnet", "dropout", "multi_output", "views", "outputs", "counter", "constants"]


def networkx_value(network: FlowNetwork, byte_price: int) -> int:
    priced: nx.DiGraph = nx.DiGraph()
    for tail, head, arc in network.graph.edges(data=True):
        priced.add_edge(tail, head)
        if "capacity" in arc:
            priced[tail][head]["capacity"] = arc["capacity"] + byte_price * arc.get("bytes", 0)
    return nx.minimum_cut_value(priced, SOURCE, SINK)


@pytest.mark.parametrize("name", graphs.MODELS)
def test_cut_equals_networkx_and_is_a_plan_at_every_price_of_a_byte(name: str):
    planner = graphs.planner(name)
    solver = CutSolver(planner.network)
    for price in BYTE_PRICES:
        cut = solver.minimum_cut(price)
        assert cut.value == networkx_value(planner.network, price)
        checks.check_cut(planner.network, planner.rules, cut, price)


@pytest.mark.parametrize("name", SMALL)
def test_no_plan_at_all_is_cheaper_and_none_as_cheap_recomputes_less(name: str):
    planner = graphs.planner(name)
    joint, costs = planner.joint, planner.costs
    save = {node: costs.save_price(node) for node in joint.nodes}
    again = {node: costs.recompute_price(node) for node in joint.nodes}
    choices = list(checks.all_choices(joint, planner.rules))
    assert len(choices) > 1
    solver = CutSolver(planner.network)
    for price in BYTE_PRICES:
        prices = [choice.cost(save.__getitem__, again.__getitem__, price) for choice in choices]
        cut = solver.minimum_cut(price)
        assert cut.value == min(prices)
        recomputed = {planner.network.node(v) for v in cut.sink_side if v[1] is Port.IN}
        equals = [choice for choice, cost in zip(choices, prices, strict=True) if cost == cut.value]
        assert all(recomputed <= choice.recomputed for choice in equals)


@pytest.mark.parametrize("name", ["chain", "dropout", "multi_output", "outputs", "counter", "constants"])
def test_cut_is_the_least_of_all_plans_at_random_prices_and_rules(name: str):
    planner = graphs.planner(name)
    joint = planner.joint
    unsatisfiable = 0
    for seed in range(12):
        draw = random.Random(seed)
        save = {node: draw.randrange(8) for node in joint.nodes}
        again = {node: draw.randrange(8) for node in joint.nodes}
        more = [node for node in joint.nodes if node not in joint.tangent_closure and draw.random() < 0.04 * seed]
        rules = Rules(
            planner.rules.no_recompute | dict.fromkeys(more[::2], "by lot"),
            planner.rules.no_save | dict.fromkeys(more[1::2], "by lot"),
        )
        network = build(joint, rules, save.__getitem__, again.__getitem__)
        least = checks.cheapest(joint, rules, save.__getitem__, again.__getitem__)
        if least is None:
            unsatisfiable += 1
            with pytest.raises(UnsatisfiableCut):
                CutSolver(network).minimum_cut()
        else:
            cut = CutSolver(network).minimum_cut()
            assert cut.value == least
            checks.check_cut(network, rules, cut)
    assert unsatisfiable < 12


@pytest.mark.parametrize("name", graphs.MODELS)
def test_network_holds_both_prices_of_each_value_and_leaves_out_what_a_rule_forbids(name: str):
    planner = graphs.planner(name)
    joint, rules, costs, graph = planner.joint, planner.rules, planner.costs, planner.network.graph
    for node in needed_values(joint):
        inside, outside = (joint.index[node], Port.IN), (joint.index[node], Port.OUT)
        again, save = graph[SOURCE][inside], graph[inside][outside]
        once = rules.no_recompute | rules.unwise_recompute
        assert again.get("capacity") == (None if node in once else costs.recompute_price(node))
        unsaved = rules.no_save | rules.unwise_save
        assert save.get("capacity") == (None if node in unsaved else costs.save_price(node))
        assert save["bytes"] == saved_bytes(node)
        assert once.get(node, "price to recompute") in again["reason"]
        assert unsaved.get(node, "price to save") in save["reason"]
    assert all(isinstance(c, int) and c >= 0 for _, _, c in graph.edges(data="capacity") if c is not None)


def test_saved_bytes_never_grow_with_the_price_of_a_byte():
    for name in ("bottleneck", "residual", "attention"):
        planner = graphs.planner(name)
        solver = CutSolver(planner.network)
        kept = []
        for price in [0, *(2**power for power in range(8, 36, 2)), 10**18]:
            saved = solver.minimum_cut(price).saved()
            kept.append(sum(saved_bytes(planner.joint.nodes[position]) for position in saved))
        assert kept == sorted(kept, reverse=True)
        assert kept[-1] < kept[0]


# --- no finite cut -----------------------------------------------------------------------------------------------


def exp_of_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(torch.exp(x @ w))  # the line that the message names


@pytest.fixture(scope="module")
def conflicting() -> tuple[Planner, Rules]:
    """The backward reads `exp`, which two rules forbid."""
    planner = graphs.planner_of(graphs.joint_of(exp_of_product, graphs.leaf(4, 4), graphs.leaf(4, 4)))
    exp = planner.joint.by_name["exp"]
    rules = planner.rules
    return planner, Rules(rules.no_recompute | {exp: "it counts its calls"}, rules.no_save | {exp: "it is secret"})


def line_of(marker: str) -> str:
    source = Path(__file__).read_text().splitlines()
    (number,) = (n for n, line in enumerate(source, start=1) if marker in line and "line_of" not in line)
    return f"{Path(__file__).name}:{number}"


def test_conflict_of_two_rules_is_told_with_both_the_node_and_the_users_line(conflicting: tuple[Planner, Rules]):
    planner, rules = conflicting
    network = build(planner.joint, rules, planner.costs.save_price, planner.costs.recompute_price)
    with pytest.raises(UnsatisfiableCut) as caught:
        CutSolver(network).minimum_cut()
    message = str(caught.value)
    assert "exp (aten.exp.default)" in message
    assert "may not recompute: it counts its calls" in message
    assert "may not save: it is secret" in message
    assert "read by the backward" in message
    assert line_of("# the line that the message names") in message
    assert "torch.sin(torch.exp(x @ w))" in message
    # nothing that is not part of the conflict
    assert "primals" not in message
    assert "mm" not in message


def test_either_rule_alone_is_no_conflict(conflicting: tuple[Planner, Rules]):
    planner, rules = conflicting
    exp = planner.joint.by_name["exp"]
    for one in (Rules(rules.no_recompute, planner.rules.no_save), Rules(planner.rules.no_recompute, rules.no_save)):
        network = build(planner.joint, one, planner.costs.save_price, planner.costs.recompute_price)
        cut = CutSolver(network).minimum_cut()
        checks.check_cut(network, one, cut)
        assert (planner.joint.index[exp] in cut.saved()) == (exp in one.no_recompute)


def test_conflict_over_several_nodes_tells_each_of_them_in_order():
    def run(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(torch.exp(torch.sigmoid(x @ w).cumsum(0)))

    planner = graphs.planner_of(graphs.joint_of(run, graphs.leaf(4, 4), graphs.leaf(4, 4)))
    joint = planner.joint
    cumsum, exp = joint.by_name["cumsum"], joint.by_name["exp"]
    rules = Rules(
        planner.rules.no_recompute | {cumsum: "it has an effect"},
        planner.rules.no_save | {cumsum: "it is too large", exp: "it is secret"},
    )
    with pytest.raises(UnsatisfiableCut) as caught:
        CutSolver(build(joint, rules, lambda node: 1, lambda node: 1)).minimum_cut()
    message = str(caught.value)
    parts = ["it has an effect", "it is too large", "needs cumsum", "it is secret", "read by the backward"]
    assert [message.count(part) for part in parts] == [1] * 5
    places = [message.index(part) for part in ["cumsum", *parts[:2], "exp", *parts[2:]]]
    assert places == sorted(places)
    assert message.count(f"{Path(__file__).name}:") == 2


def test_conflict_is_refused_at_every_price(conflicting: tuple[Planner, Rules]):
    planner, rules = conflicting
    solver = CutSolver(build(planner.joint, rules, planner.costs.save_price, planner.costs.recompute_price))
    for price in BYTE_PRICES:
        with pytest.raises(UnsatisfiableCut):
            solver.minimum_cut(price)


# --- determinism -------------------------------------------------------------------------------------------------


def all_saved() -> dict[str, list[list[str]]]:
    """What some plans of every small model save, by name."""
    result = {}
    for name in ("dropout", "multi_output", "outputs", "convnet"):
        planner = graphs.planner(name)
        candidates = [planner.choose()[0], planner.smallest(), planner.random(5)]
        result[name] = [[node.name for node in candidate.plan.saved] for candidate in candidates]
        result[name] += [[node.name for node in candidate.plan.backward] for candidate in candidates]
    return result


def test_plans_are_the_same_in_a_process_with_another_hash_seed():
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    program = "import json; from tests.test_mincut import all_saved; print(json.dumps(all_saved()))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == all_saved()
