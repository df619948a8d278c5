"""Passes: what they leave alone, what they merge, drop and order; and that the verifier refuses what is broken."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from remat import ops, passes
from remat.errors import InvalidPlan, UnsupportedGraph
from remat.joint import JointGraph
from remat.passes.normalize import copy_graph, dead_code
from remat.passes.partition import Partition
from remat.passes.reorder import order_backward, order_forward
from remat.passes.split import split
from remat.passes.verify import verify
from remat.plan import Plan, make_plan
from remat.plans import Planner
from remat.rules import Rules
from remat.settings import Settings
from tests import checks, graphs

aten = torch.ops.aten
HERE = Path(__file__).name


@torch.library.custom_op("rematpasses::roll", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def roll(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@torch.library.custom_op("rematpasses::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x + 1


ROLL, OPAQUE = torch.ops.rematpasses.roll.default, torch.ops.rematpasses.opaque.default


def operators(module: fx.GraphModule) -> list[str]:
    return [ops.name(node) for node in module.graph.nodes if node.op == "call_function"]


def state(module: fx.GraphModule) -> tuple[str, list[dict[str, Any]]]:
    """A graph and its metadata, to tell whether a pass wrote into it."""
    return str(module.graph), [dict(node.meta) for node in module.graph.nodes]


def plans_of(planner: Planner) -> list[Plan]:
    drawn = [checks.drawn_choice(planner.joint, planner.rules, seed) for seed in range(5)]
    candidates = (planner.choose()[0], planner.smallest(), planner.random(0))
    return [c.plan for c in candidates] + [make_plan(planner.joint, list(choice.saved), "coin") for choice in drawn]


@functools.cache
def rewritten(name: str) -> list[tuple[Plan, Partition]]:
    """Eight plans of a model, written out. Tests look at them only."""
    planner = graphs.planner(name)
    return [(plan, passes.rewrite(plan, planner.rules)) for plan in plans_of(planner)]


# --- normalize ---------------------------------------------------------------------------------------------------


def hand_made(build: Callable[[fx.Graph, fx.Node, fx.Node], list[fx.Node | None]], forward: int = 1) -> JointGraph:
    """A joint graph over one primal and one tangent, its nodes made by hand and valued by running them."""
    graph = fx.Graph()
    values: dict[fx.Node, Tensor] = {}
    for name in ("primals_1", "tangents_1"):
        values[graph.placeholder(name)] = torch.randn(4, 4)
    primal, tangent = values
    graph.output(build(graph, primal, tangent))
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    for node, value in values.items():
        node.meta["val"] = value
    return JointGraph(fx.GraphModule(torch.nn.Module(), graph), forward)


@pytest.mark.parametrize("name", graphs.MODELS)
def test_preparing_and_rewriting_leave_the_given_graph_untouched(name: str):
    given = graphs.joint(name)
    before = state(given.module)
    planner = graphs.planner_of(given)
    prepared = state(planner.joint.module)
    for plan in plans_of(planner)[:3]:
        passes.rewrite(plan, planner.rules)
    assert state(given.module) == before
    assert state(planner.joint.module) == prepared
    assert planner.joint.module is not given.module


def test_copy_shares_tensors_but_no_node():
    given = graphs.joint("embedding")
    made = copy_graph(given, Settings())
    assert str(made.module.graph) == str(given.module.graph)
    assert not set(made.module.graph.nodes) & set(given.module.graph.nodes)
    assert (made.num_fwd_outputs, made.static_indices) == (given.num_fwd_outputs, given.static_indices)


def test_equal_computations_become_one():
    def build(graph: fx.Graph, x: fx.Node, t: fx.Node) -> list[fx.Node | None]:
        first, second = graph.call_function(aten.sin.default, (x,)), graph.call_function(aten.sin.default, (x,))
        result = graph.call_function(aten.exp.default, (first,))
        gradient = graph.call_function(aten.mul.Tensor, (t, second))
        return [result, graph.call_function(aten.mul.Tensor, (gradient, first))]

    given = hand_made(build)
    prepared = passes.prepare(given, Settings())
    assert operators(given.module).count("aten.sin.default") == 2
    assert operators(prepared.module).count("aten.sin.default") == 1
    checks.check_same_bits(checks.run_joint(prepared), checks.run_joint(given))


@pytest.mark.parametrize("name", ["rand", "roll", "opaque"])
def test_what_is_random_or_of_unknown_purity_is_never_merged(name: str):
    def build(graph: fx.Graph, x: fx.Node, t: fx.Node) -> list[fx.Node | None]:
        calls = {"rand": (aten.rand.default, ([4, 4],)), "roll": (ROLL, (x,)), "opaque": (OPAQUE, (x,))}
        both = graph.call_function(aten.sub.Tensor, tuple(graph.call_function(*calls[name]) for _ in range(2)))
        return [graph.call_function(aten.mul.Tensor, (x, both)), graph.call_function(aten.mul.Tensor, (t, both))]

    given = hand_made(build)
    prepared = passes.prepare(given, Settings())
    assert operators(prepared.module) == operators(given.module)


def test_operator_declared_pure_may_be_merged():
    def build(graph: fx.Graph, x: fx.Node, t: fx.Node) -> list[fx.Node | None]:
        both = graph.call_function(aten.add.Tensor, tuple(graph.call_function(OPAQUE, (x,)) for _ in range(2)))
        return [graph.call_function(aten.mul.Tensor, (x, both)), graph.call_function(aten.mul.Tensor, (t, both))]

    prepared = passes.prepare(hand_made(build), Settings(recompute_ops=("rematpasses.opaque",)))
    assert operators(prepared.module).count("rematpasses.opaque.default") == 1


def test_what_nothing_uses_is_dropped_and_writes_are_not():
    def build(graph: fx.Graph, x: fx.Node, t: fx.Node) -> list[fx.Node | None]:
        used = graph.call_function(aten.sin.default, (x,))
        graph.call_function(aten.exp.default, (graph.call_function(aten.cos.default, (x,)),))
        graph.call_function(aten.copy_.default, (x, used))
        return [used, graph.call_function(aten.mul.Tensor, (t, used))]

    prepared = dead_code(copy_graph(hand_made(build), Settings()), Settings())
    assert operators(prepared.module) == ["aten.sin.default", "aten.copy_.default", "aten.mul.Tensor"]


@pytest.mark.parametrize("name", graphs.MODELS)
def test_prepared_graph_computes_what_the_given_one_does(name: str):
    given = graphs.joint(name)
    checks.check_same_bits(checks.run_joint(passes.prepare(given, Settings())), checks.run_joint(given))


def test_graph_with_a_gradient_among_its_forward_outputs_is_refused_by_name():
    def build(graph: fx.Graph, x: fx.Node, t: fx.Node) -> list[fx.Node | None]:
        return [graph.call_function(aten.mul.Tensor, (t, x)), t]

    with pytest.raises(UnsupportedGraph, match=r"forward output mul.* depends on a gradient"):
        passes.prepare(hand_made(build), Settings())


def test_more_forward_outputs_than_outputs_are_refused():
    with pytest.raises(UnsupportedGraph, match="3 forward outputs announced"):
        passes.prepare(hand_made(lambda graph, x, t: [x, x], forward=3), Settings())


# --- split and reorder -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", graphs.MODELS)
def test_partition_keeps_names_operators_and_metadata_of_the_joint_graph(name: str):
    by_name = graphs.planner(name).joint.by_name
    for _, partition in rewritten(name):
        for module in (partition.forward, partition.backward):
            for node in module.graph.nodes:
                if node.op == "call_function":
                    assert node.target == by_name[node.name].target
                    assert node.meta["val"] is by_name[node.name].meta["val"]


@pytest.mark.parametrize("name", graphs.MODELS)
def test_backward_runs_in_the_plans_order_each_forward_value_at_most_once(name: str):
    for plan, partition in rewritten(name):
        run = [node.name for node in partition.backward.graph.nodes if node.op not in ("placeholder", "output")]
        planned = [node.name for node in plan.backward]
        assert len(set(run)) == len(run)
        assert run == planned


@pytest.mark.parametrize("name", graphs.MODELS)
def test_recomputed_values_run_just_before_they_are_first_needed(name: str):
    closure = {node.name for node in graphs.planner(name).joint.tangent_closure}
    for _, partition in rewritten(name):
        order = [n for n in partition.backward.graph.nodes if n.op == "call_function"]
        place = {node: position for position, node in enumerate(order)}
        for node in order:
            if node.name in closure or ops.is_item(node):
                continue
            # Between it and its first reader there are only values recomputed for the same use.
            first = min(place[user] for user in node.users if user.op != "output")
            between = order[place[node] + 1 : first]
            assert [n.name for n in between if n.name in closure] == []


@pytest.mark.parametrize("name", ["multi_output", "convnet", "residual", "attention", "views"])
def test_items_of_a_tuple_follow_their_operator_in_both_graphs(name: str):
    seen = 0
    for _, partition in rewritten(name):
        for module in (partition.forward, partition.backward):
            for node in module.graph.nodes:
                if ops.is_item(node):
                    seen += 1
                    assert ops.is_item(node.prev) or node.prev is node.args[0]
    assert seen


@pytest.mark.parametrize("name", graphs.MODELS)
def test_forward_runs_nothing_for_the_backward_alone_but_what_is_saved(name: str):
    for plan, partition in rewritten(name):
        run = {node.name for node in partition.forward.graph.nodes if node.op == "call_function"}
        assert run == {node.name for node in plan.forward_set if node.op == "call_function"}


def test_recomputed_operators_of_the_plan_are_those_that_run_twice():
    for name in ("residual", "attention", "multi_output", "dropout"):
        for plan, partition in rewritten(name):
            assert checks.recomputed_names(partition) == [node.name for node in plan.recomputed]


# --- the verifier ------------------------------------------------------------------------------------------------


def pieces(planner: Planner, plan: Plan) -> Partition:
    """A partition before anything is verified."""
    return order_forward(order_backward(split(plan), plan), plan)


def broken(module: fx.GraphModule, edit: Callable[[fx.Graph], None]) -> fx.GraphModule:
    graph = copy.deepcopy(module.graph)
    edit(graph)
    graph.lint()
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    return made


def refused(partition: Partition, plan: Plan, rules: Rules) -> str:
    with pytest.raises(InvalidPlan) as caught:
        verify(partition, plan, rules)
    return str(caught.value)


@pytest.fixture(scope="module")
def planner() -> Planner:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.exp(x @ w)
        z = torch.sin(y).div(torch.tanh(w).sum())
        return torch.sigmoid(z - y) @ w.t(), z

    return graphs.planner_of(graphs.joint_of(run, graphs.leaf(8, 6), graphs.leaf(6, 4)))


@pytest.fixture(scope="module")
def plan(planner: Planner) -> Plan:
    return planner.cut(0).plan


def node_of(module: fx.GraphModule | fx.Graph, target: Any) -> fx.Node:
    graph = module if isinstance(module, fx.Graph) else module.graph
    return next(node for node in graph.nodes if node.target is target)


def test_untouched_partition_passes(planner: Planner, plan: Plan):
    verify(pieces(planner, plan), plan, planner.rules)
    verify(pieces(planner, planner.smallest().plan), planner.smallest().plan, planner.rules)


def test_plan_that_saves_a_view_is_refused_by_name_and_line():
    planner = graphs.planner("views")
    joint = planner.joint
    view = next(n for n in joint.needed_by_backward if ops.is_view(n) and ops.view_base(n).op == "call_function")
    plan = make_plan(joint, [view, *(ops.view_base(n) for n in joint.needed_by_backward if n is not view)], "hand")
    assert view in plan.saved
    message = refused(pieces(planner, plan), plan, planner.rules)
    assert view.name in message
    assert "a view" in message
    assert "tests/graphs.py:" in message


def test_plan_that_saves_a_constant_is_refused_by_name():
    planner = graphs.planner("loss")
    joint = planner.joint
    constant = next(n for n in joint.needed_by_backward if ops.kind(n) is ops.Kind.FACTORY)
    plan = make_plan(joint, [ops.view_base(n) for n in joint.needed_by_backward], "hand")
    assert constant in plan.saved
    message = refused(pieces(planner, plan), plan, planner.rules)
    assert constant.name in message
    assert "a constant" in message


@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
def test_plan_that_draws_again_is_refused_by_name_and_line(name: str):
    planner = graphs.planner(name)
    joint, rules = planner.joint, planner.rules
    draws = [node for node in joint.nodes if ops.draws_random_numbers(node)]
    assert draws
    unsaved = [node for node in joint.nodes if node.op != "placeholder"]
    without = Rules(
        {node: reason for node, reason in rules.no_recompute.items() if node not in draws},
        rules.no_save | dict.fromkeys(unsaved, "to force it"),
    )
    choice = checks.drawn_choice(joint, without, 0)
    plan = make_plan(joint, list(choice.saved), "hand")
    assert set(draws) & set(plan.backward)
    partition = pieces(planner, plan)
    verify(partition, plan, without)
    for announced in (plan, planner.smallest().plan):  # the plan itself, and a good one that the graphs do not follow
        message = refused(partition, announced, rules)
        assert draws[0].name in message
        assert "draws random numbers" in message
        assert ops.user_source(draws[0]) in message


def test_drawing_again_really_gives_other_gradients():
    """Why the verifier refuses it: the negative control of the test above."""
    planner = graphs.planner("dropout")
    joint = planner.joint
    plan = make_plan(joint, [node for node in joint.nodes if node.op == "placeholder"], "hand")
    partition = pieces(planner, plan)
    with pytest.raises(AssertionError, match="gradients"):
        checks.check_same_bits(checks.run_partition(partition, joint), checks.run_joint(joint))


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_swapped_argument_is_refused_by_name(planner: Planner, plan: Plan, which: str):
    partition = pieces(planner, plan)
    swapped: list[str] = []

    def edit(graph: fx.Graph) -> None:
        for node in graph.nodes:
            nodes = [argument for argument in node.args if isinstance(argument, fx.Node)]
            if node.op == "call_function" and len(nodes) == 2 and nodes[0] is not nodes[1]:
                node.args = tuple(reversed(node.args))
                swapped.append(node.name)
                return

    changed = replace(partition, **{which: broken(getattr(partition, which), edit)})
    message = refused(changed, plan, planner.rules)
    assert swapped[0] in message
    assert which in message


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_exchanged_operator_and_foreign_node_are_refused_by_name(planner: Planner, plan: Plan, which: str):
    partition = pieces(planner, plan)
    names: list[str] = []

    def exchange(graph: fx.Graph) -> None:
        node = node_of(graph, aten.mm.default)
        node.target = aten.matmul.default
        names.append(node.name)

    def insert(graph: fx.Graph) -> None:
        node = node_of(graph, aten.mm.default)
        with graph.inserting_before(node):
            made = graph.call_function(aten.neg.default, (node.args[0],))
        names.append(made.name)

    for edit in (exchange, insert):
        changed = replace(partition, **{which: broken(getattr(partition, which), edit)})
        assert names[-1] in refused(changed, plan, planner.rules)


def test_changed_constant_argument_is_refused_by_name(planner: Planner):
    split_graph = graphs.planner("multi_output")
    plan = split_graph.smallest().plan
    partition = pieces(split_graph, plan)

    def edit(graph: fx.Graph) -> None:
        node = node_of(graph, aten.topk.default)
        node.args = (node.args[0], 2, *node.args[2:])

    changed = replace(partition, forward=broken(partition.forward, edit))
    assert "topk" in refused(changed, plan, split_graph.rules)


def edit_outputs(change: Callable[[list[Any]], list[Any]]) -> Callable[[fx.Graph], None]:
    def edit(graph: fx.Graph) -> None:
        output = graph.output_node()
        (results,) = output.args
        output.args = (tuple(change(list(results))),)

    return edit


def test_swapped_gradients_are_refused_by_name(planner: Planner, plan: Plan):
    partition = pieces(planner, plan)
    changed = replace(partition, backward=broken(partition.backward, edit_outputs(lambda g: g[::-1])))
    message = refused(changed, plan, planner.rules)
    assert all(node.name in message for node in planner.joint.backward_outputs)


def test_dropped_gradient_is_refused(planner: Planner, plan: Plan):
    partition = pieces(planner, plan)
    for change in (lambda g: [*g[:-1], None], lambda g: g[:-1]):
        changed = replace(partition, backward=broken(partition.backward, edit_outputs(change)))
        assert planner.joint.backward_outputs[-1].name in refused(changed, plan, planner.rules)


def test_swapped_forward_outputs_are_refused_by_name(planner: Planner, plan: Plan):
    partition = pieces(planner, plan)
    changed = replace(partition, forward=broken(partition.forward, edit_outputs(lambda r: [r[1], r[0], *r[2:]])))
    message = refused(changed, plan, planner.rules)
    assert any(node.name in message for node in planner.joint.forward_outputs)


def test_dropped_saved_value_is_refused_by_name(planner: Planner, plan: Plan):
    partition = pieces(planner, plan)
    lost = plan.saved[-1].name
    changed = replace(partition, forward=broken(partition.forward, edit_outputs(lambda r: r[:-1])))
    assert lost in refused(changed, plan, planner.rules)


def test_reordered_saved_values_are_refused_by_name(planner: Planner, plan: Plan):
    partition = pieces(planner, plan)
    count = planner.joint.num_fwd_outputs
    assert len(plan.saved) > 2
    changed = replace(
        partition, forward=broken(partition.forward, edit_outputs(lambda r: [*r[:count], r[-1], *r[count:-1]]))
    )
    message = refused(changed, plan, planner.rules)
    assert all(node.name in message for node in plan.saved)


def swap_placeholders(first: str, second: str) -> Callable[[fx.Graph], None]:
    """Exchange the places of two inputs; every use still goes by name."""

    def edit(graph: fx.Graph) -> None:
        by_name = {node.name: node for node in graph.nodes}
        one, two = by_name[first], by_name[second]
        before = one.prev
        two.append(one)
        before.append(two)

    return edit


def test_exchanged_inputs_of_the_forward_are_refused_by_name(planner: Planner, plan: Plan):
    partition = pieces(planner, plan)
    changed = replace(partition, forward=broken(partition.forward, swap_placeholders("primals_1", "primals_2")))
    assert "primals_1" in refused(changed, plan, planner.rules)


def test_exchanged_incoming_gradients_are_refused_by_name(planner: Planner, plan: Plan):
    partition = pieces(planner, plan)
    changed = replace(partition, backward=broken(partition.backward, swap_placeholders("tangents_1", "tangents_2")))
    assert "tangents_1" in refused(changed, plan, planner.rules)


def test_backward_that_takes_a_primal_the_forward_does_not_save_is_refused_by_name(planner: Planner):
    plan = planner.cut(0).plan
    partition = pieces(planner, plan)

    def edit(graph: fx.Graph) -> None:
        first = next(iter(graph.nodes))
        with graph.inserting_before(first):
            made = graph.placeholder("extra")
            made.meta = dict(first.meta)

    changed = replace(partition, backward=broken(partition.backward, edit))
    assert "extra" in refused(changed, plan, planner.rules)


@pytest.mark.parametrize("name", ["counter", "snapshot"])
def test_backward_that_reads_an_input_after_the_forward_wrote_it_is_refused_by_name(name: str):
    planner = graphs.planner(name)
    joint, rules = planner.joint, planner.rules
    (written,) = [node for node in joint.written_primals if node.users]
    lax = Rules(rules.no_recompute, {node: reason for node, reason in rules.no_save.items() if node is not written})
    plan = make_plan(joint, [n for n in joint.nodes if n.op == "placeholder" and n not in joint.tangents], "hand")
    assert written in plan.saved
    partition = pieces(planner, plan)
    for announced, given in ((plan, rules), (plan, lax), (planner.smallest().plan, rules)):
        message = refused(partition, announced, given)
        assert written.name in message
        assert "the forward writes" in message
    with pytest.raises(AssertionError, match="gradients"):
        checks.check_same_bits(checks.run_partition(partition, joint), checks.run_joint(joint))


def test_operator_of_unknown_purity_in_both_graphs_is_refused_by_name(planner: Planner):
    plan = planner.smallest().plan
    again = next(node for node in plan.recomputed if ops.name(node) == "aten.mm.default")
    rules = Rules(planner.rules.no_recompute | {again: "counts its calls"}, planner.rules.no_save)
    keeping = make_plan(planner.joint, [*plan.saved, again], "hand")
    assert again not in keeping.backward
    for announced in (plan, keeping):
        message = refused(pieces(planner, plan), announced, rules)
        assert again.name in message
        assert "counts its calls" in message
        assert f"{HERE}:" in message


def test_schedule_that_leaves_out_a_node_is_refused_by_name(planner: Planner, plan: Plan):
    for left in plan.backward:
        poorer = replace(plan, backward=tuple(node for node in plan.backward if node is not left))
        with pytest.raises(InvalidPlan, match=rf"\b{left.name}\b"):
            passes.rewrite(poorer, planner.rules)


def test_schedule_that_runs_a_node_before_its_argument_is_refused_by_name(planner: Planner, plan: Plan):
    with pytest.raises(InvalidPlan, match=rf"\b{plan.backward[-1].name}\b"):
        passes.rewrite(replace(plan, backward=plan.backward[::-1]), planner.rules)


def test_plan_that_lacks_a_needed_input_is_refused_by_name(planner: Planner):
    plan = planner.smallest().plan
    needed = plan.saved[0]
    poorer = replace(plan, saved=plan.saved[1:])
    message = refused(pieces(planner, plan), poorer, planner.rules)
    assert needed.name in message
    assert "is not saved" in message
