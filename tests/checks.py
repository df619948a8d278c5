"""Judges that share no code with what they judge: all plans of a small graph, certificates, and runs on real tensors.

A plan is brute-forced from the definition alone: what the backward reads is available there, saved or recomputed;
what is recomputed needs its arguments available. No flow network, no order, no solver.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from remat import ops
from remat.costs import saved_bytes
from remat.eager import OpByOp
from remat.joint import JointGraph
from remat.mincut import Cut
from remat.network import SINK, SOURCE, FlowNetwork, Port
from remat.passes.partition import Partition
from remat.rules import Rules

Price = Callable[[fx.Node], int]


# --- all plans ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One way to make everything available that the backward reads."""

    saved: frozenset[fx.Node]
    recomputed: frozenset[fx.Node]

    def cost(self, save_price: Price, recompute_price: Price, byte_price: int = 0) -> int:
        """The objective of the minimum cut."""
        kept = sum(save_price(node) + byte_price * saved_bytes(node) for node in self.saved)
        return kept + sum(recompute_price(node) for node in self.recomputed)


def all_choices(
    joint: JointGraph, rules: Rules, *, unwise: bool = False, limit: int = 300_000
) -> Iterator[Choice]:
    """Every choice that the rules allow, each once; those a solver leaves out as unwise only where asked for.

    More than `limit` of them is an error of the test.
    """
    candidates = [node for node in reversed(joint.nodes) if node not in joint.tangent_closure]
    stack: list[tuple[int, frozenset[fx.Node], frozenset[fx.Node], frozenset[fx.Node]]] = [
        (0, frozenset(joint.needed_by_backward), frozenset(), frozenset())
    ]
    count = 0
    while stack:
        position, wanted, saved, recomputed = stack.pop()
        while position < len(candidates) and candidates[position] not in wanted:
            position += 1
        if position == len(candidates):
            count += 1
            assert count <= limit, f"more than {limit} plans: take a smaller graph"
            yield Choice(saved, recomputed)
            continue
        node = candidates[position]
        if node not in rules.no_save and (unwise or node not in rules.unwise_save):
            stack.append((position + 1, wanted, saved | {node}, recomputed))
        if node not in rules.no_recompute and (unwise or node not in rules.unwise_recompute):
            needs = wanted | frozenset(node.all_input_nodes)
            stack.append((position + 1, needs, saved, recomputed | {node}))


def drawn_choice(joint: JointGraph, rules: Rules, seed: int) -> Choice:
    """A choice drawn by a coin of its own bias at each value: wilder plans than any price would give."""
    draw = random.Random(seed)
    bias = draw.random()
    possible: set[fx.Node] = set()
    for node in joint.nodes:
        if node not in rules.no_save or (node not in rules.no_recompute and possible.issuperset(node.all_input_nodes)):
            possible.add(node)
    wanted = set(joint.needed_by_backward)
    saved, recomputed = set(), set()
    for node in reversed(joint.nodes):
        if node not in wanted:
            continue
        may_recompute = node not in rules.no_recompute and possible.issuperset(node.all_input_nodes)
        if may_recompute and (node in rules.no_save or draw.random() < bias):
            recomputed.add(node)
            wanted.update(node.all_input_nodes)
        else:
            assert node not in rules.no_save, f"{node.name} may be neither saved nor recomputed"
            saved.add(node)
    return Choice(frozenset(saved), frozenset(recomputed))


def cheapest(
    joint: JointGraph, rules: Rules, save_price: Price, recompute_price: Price, byte_price: int = 0
) -> int | None:
    """The least cost of all choices; None where the rules allow none."""
    costs = (choice.cost(save_price, recompute_price, byte_price) for choice in all_choices(joint, rules))
    return min(costs, default=None)


def is_available(joint: JointGraph, rules: Rules, saved: Sequence[fx.Node]) -> str | None:
    """What the backward cannot get from these saved values by operators that may run twice; None if it can get all."""
    kept = set(saved)
    pending, seen = list(joint.needed_by_backward), set(kept)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in rules.no_recompute:
            return f"{node.name} is not saved and may not be recomputed: {rules.no_recompute[node]}"
        pending += node.all_input_nodes
    return None


# --- certificates ------------------------------------------------------------------------------------------------


def check_cut(network: FlowNetwork, rules: Rules, cut: Cut, byte_price: int = 0) -> None:
    """A cut is a plan: it separates, is finite, costs what it says, saves and recomputes only what may be."""
    assert SINK in cut.sink_side
    assert SOURCE not in cut.sink_side
    paid = 0
    for tail, head, arc in network.graph.edges(data=True):
        if tail not in cut.sink_side and head in cut.sink_side:
            assert "capacity" in arc, f"cuts {tail} -> {head}: {arc['reason']}"
            paid += arc["capacity"] + byte_price * arc.get("bytes", 0)
    assert paid == cut.value
    saved = [network.joint.nodes[position] for position in cut.saved()]
    assert not [node.name for node in saved if node in rules.no_save]
    assert is_available(network.joint, rules, saved) is None
    recomputed = [network.node(v) for v in cut.sink_side if v[1] is Port.IN]
    assert not [node.name for node in recomputed if node in rules.no_recompute]


def check_reads(partition: Partition, joint: JointGraph) -> None:
    """The forward reads the primals, the backward saved values and tangents; neither reads anything else."""
    primals = [node.name for node in joint.nodes if node.op == "placeholder" and node not in joint.tangent_closure]
    tangents = [node.name for node in joint.nodes if node.op == "placeholder" and node in joint.tangent_closure]
    assert [node.name for node in partition.forward.graph.find_nodes(op="placeholder")] == primals
    (results,) = partition.forward.graph.output_node().args
    passed = [node.name for node in results[joint.num_fwd_outputs :]]
    tensors = passed[: len(passed) - partition.num_sizes]
    sizes = passed[len(tensors) :]
    taken = [node.name for node in partition.backward.graph.find_nodes(op="placeholder")]
    assert taken == sizes + tensors + tangents
    for module in (partition.forward, partition.backward):
        seen: set[fx.Node] = set()
        for node in module.graph.nodes:
            assert seen.issuperset(node.all_input_nodes), f"{node.name} reads what has not run yet"
            seen.add(node)


# --- runs on real tensors ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """What one step gives: forward outputs, inputs as the forward leaves them, gradients."""

    outputs: list[Any]
    inputs: list[Any]
    gradients: list[Any]


def concrete(size: Any) -> int:
    """The size at hand when the graph was captured."""
    return size if isinstance(size, int) else int(size.node.hint)


def example(node: fx.Node) -> Any:
    """A random value of a placeholder's metadata; small integers, so that they serve as indices."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return concrete(value)
    size, stride = [concrete(extent) for extent in value.shape], [concrete(extent) for extent in value.stride()]
    result = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    return result.normal_() if value.dtype.is_floating_point else result.random_(0, 4)


def examples(nodes: Sequence[fx.Node], seed: int) -> list[Any]:
    """One value for each placeholder."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(seed)
        return [example(node) for node in nodes]


def inputs_of(joint: JointGraph) -> list[fx.Node]:
    """The placeholders of the forward."""
    return [node for node in joint.nodes if node.op == "placeholder" and node not in joint.tangent_closure]


def run_joint(joint: JointGraph, seed: int = 1) -> Results:
    """Forward and backward at once, in the joint graph's order."""
    inputs, tangents = examples(inputs_of(joint), seed), examples(joint.tangents, seed + 1000)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(seed)
        results = OpByOp(joint.module)([*inputs, *tangents])
    return Results(list(results[: joint.num_fwd_outputs]), inputs, list(results[joint.num_fwd_outputs :]))


def run_partition(partition: Partition, joint: JointGraph, seed: int = 1) -> Results:
    """Forward, then backward, what is saved passed on by position as AOTAutograd does."""
    inputs, tangents = examples(inputs_of(joint), seed), examples(joint.tangents, seed + 1000)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(seed)
        results = list(OpByOp(partition.forward)(list(inputs)))
        outputs, saved = results[: joint.num_fwd_outputs], results[joint.num_fwd_outputs :]
        # Between forward and backward the user may draw numbers of their own.
        torch.rand(7)
        tensors = saved[: len(saved) - partition.num_sizes]
        gradients = OpByOp(partition.backward)([*saved[len(tensors) :], *tensors, *tangents])
    return Results(outputs, inputs, list(gradients))


def same_bits(mine: Any, truth: Any) -> bool:
    """Equal to the last bit, NaNs and signed zeros included."""
    if not isinstance(mine, Tensor) or not isinstance(truth, Tensor):
        return bool(mine == truth)
    if mine.dtype != truth.dtype or mine.shape != truth.shape:
        return False
    raw_mine, raw_truth = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (mine, truth))
    return torch.equal(raw_mine, raw_truth)


def check_same_bits(mine: Results, truth: Results) -> None:
    """Two steps agree in everything that a caller can see."""
    for kind in ("outputs", "inputs", "gradients"):
        pairs = list(zip(getattr(mine, kind), getattr(truth, kind), strict=True))
        wrong = [index for index, (a, b) in enumerate(pairs) if not same_bits(a, b)]
        assert not wrong, f"{kind} {wrong} differ"


def owned(values: Sequence[Any]) -> dict[int, int]:
    """Bytes of the distinct storages among values, by address."""
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def recomputed_names(partition: Partition) -> list[str]:
    """Operators, not views or items, that run in both graphs."""
    forward = {node.name for node in partition.forward.graph.nodes if node.op == "call_function"}
    return [
        node.name
        for node in partition.backward.graph.nodes
        if node.op == "call_function" and node.name in forward and not ops.is_view(node) and not ops.is_item(node)
    ]
