"""A joint graph as a plain problem for the search, and the sequence it finds as a plan.

Views, sizes and items of tuples are no operators: a view costs nothing and is made again wherever it is read, its
memory is its base's. Inputs and constants are there anyway. What remains are the operators that own memory or have an
effect, in the form of `problem.Problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from remat import ops
from remat.costs import owned_bytes, tensor_bytes
from remat.joint import JointGraph, written_arguments
from remat.ops import Kind
from remat.plan import Plan
from remat.problem import Problem
from remat.rules import Rules

Price = Callable[[fx.Node], int]


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """A joint graph, the problem made of it, and the node of each operator and value.

    operators: None is the boundary. values: the operator's node, or that of the item; None: nobody takes the item, or
    the value stands for the order of boundary and backward alone.
    """

    joint: JointGraph
    rules: Rules
    problem: Problem
    operators: tuple[fx.Node | None, ...]
    values: tuple[fx.Node | None, ...]

    @cached_property
    def number(self) -> dict[fx.Node, int]:
        """The operator that each node is."""
        return {node: number for number, node in enumerate(self.operators) if node is not None}

    def node(self, operator: int) -> fx.Node:
        """The node of an operator other than the boundary."""
        node = self.operators[operator]
        assert node is not None
        return node

    def sequence_of(self, plan: Plan) -> tuple[int, ...]:
        """The operators that a plan runs, the boundary between its two halves."""
        assert self.problem.boundary is not None
        halves = (plan.forward, plan.backward)
        forward, backward = ([self.number[node] for node in half if node in self.number] for half in halves)
        return (*forward, self.problem.boundary, *backward)

    def plan_of(self, sequence: Sequence[int], solver: str) -> Plan:
        """The plan that runs its operators in this sequence."""
        assert self.problem.boundary is not None
        at = sequence.index(self.problem.boundary)
        saved = self._saved(sequence, at)
        taken: list[set[int]] = [set() for _ in sequence]
        for value, born, last in self.problem.lives(sequence):
            if last > born:
                taken[born].add(value)
        forward, backward = _Writer(self, None), _Writer(self, saved)
        for half, steps in ((forward, range(at)), (backward, range(at + 1, len(sequence)))):
            for step in steps:
                half.run(self.node(sequence[step]), {self.values[value] for value in taken[step]})
        for node in self.joint.backward_outputs:
            backward.provide(node)
        kept = tuple(sorted(saved | backward.from_outside, key=self.joint.index.__getitem__))
        for node in self.joint.nodes:
            if node in self.joint.required_forward or node in kept:
                forward.provide(node)
        return Plan(self.joint, kept, tuple(forward.order), tuple(backward.order), solver)

    def _saved(self, sequence: Sequence[int], at: int) -> frozenset[fx.Node]:
        """The nodes of the values that the backward reads as the forward left them."""
        problem = self.problem
        there = {value for operator in sequence[:at] for value in problem.writes[operator]}
        found = set()
        for operator in sequence[at + 1 :]:
            found.update(there.intersection(problem.reads[operator]))
            there.difference_update(problem.writes[operator])
        returned = {ops.view_base(node) for node in self.joint.backward_outputs}
        nodes = {self.values[value] for value in found} | ({self.values[value] for value in there} & returned)
        return frozenset(node for node in nodes if node is not None)


class _Writer:
    """Writes one half node by node: before an operator the views and sizes that it reads, after it its items.

    saved: what the forward left, in the backward; None in the forward.
    """

    def __init__(self, step: TrainingStep, saved: frozenset[fx.Node] | None) -> None:
        self.step, self.saved = step, saved
        self.order: list[fx.Node] = []
        self.made: dict[fx.Node, int] = {}  # how often each node has been written here
        self.shows: dict[fx.Node, int] = {}  # and how often its memory had been made when it last was
        self.from_outside: set[fx.Node] = set()

    def run(self, node: fx.Node, taken: Set[fx.Node | None]) -> None:
        """Write an operator, with what it reads and those of its items that are read before it runs again."""
        for argument in node.all_input_nodes:
            self.provide(argument)
        self._write(node)
        written: set[fx.Node] = {node}
        items = [item for item in taken if item is not None and item is not node]
        for item in sorted(items, key=self.step.joint.index.__getitem__):
            for part in _path(node, item):
                if part not in written:
                    self._write(part)
                    written.add(part)

    def provide(self, node: fx.Node) -> None:
        """Make sure that a node stands here and shows the newest version of its memory; operators have been written."""
        if node in self.step.number or (node in self.made and ops.is_item(node) and not ops.is_view(node)):
            return
        free = ops.kind(node) is Kind.SYMBOLIC and node not in self.step.rules.no_save
        if node.op == "placeholder" or (self.saved is not None and (free or node in self.saved)):
            if node not in self.step.joint.tangent_closure:
                self.from_outside.add(node)
                return
            if node.op == "placeholder":
                return
        if node in self.made and self.shows[node] == self.made.get(ops.view_base(node), 0):
            return
        for argument in node.all_input_nodes:
            self.provide(argument)
        self._write(node)

    def _write(self, node: fx.Node) -> None:
        self.order.append(node)
        self.made[node] = self.made.get(node, 0) + 1
        self.shows[node] = self.made.get(ops.view_base(node), 0)


def training_step(
    joint: JointGraph, rules: Rules, price: Price, scratch: Price, once: Set[fx.Node]
) -> TrainingStep:
    """Make the problem of a joint graph.

    price, scratch: each operator's cost of a run, and the bytes it takes for itself. once: forward values (operators
    or items) that may not be made twice.
    """
    wanted = joint.ancestors([*joint.tangent_closure, *joint.backward_outputs]) | joint.required_forward
    nodes = [node for node in joint.nodes if _is_operator(node) and node in wanted]
    forward = [node for node in nodes if node in joint.required_forward]
    rest = [node for node in nodes if node not in joint.required_forward]
    operators: list[fx.Node | None] = [*forward, None, *rest]
    boundary = len(forward)
    values: list[fx.Node | None] = []
    size: list[int] = []
    numbers: dict[fx.Node, int] = {}  # by node that owns memory
    writes: list[tuple[int, ...]] = []
    incoming = [(node, tensor_bytes(node.meta["val"]) if node.users else 0) for node in joint.tangents]
    for node in operators:
        born = _born(node) if node is not None else [(None, 0), *incoming]
        writes.append(tuple(range(len(values), len(values) + len(born))))
        for owner, count in born:
            if owner is not None:
                numbers[owner] = len(values)
            values.append(owner)
            size.append(count)
    for node in nodes:  # several items of one index
        for user in node.users:
            if ops.is_item(user) and user not in numbers and not ops.is_view(user):
                numbers.update((user, numbers[n]) for n in node.users if n in numbers and n.args == user.args)
    token = writes[boundary][0]
    # What the backward writes is read before that, and only then: each reader gives the writer an empty value.
    before_writes = _readers_before_writes(joint, nodes)
    ordered: dict[fx.Node, list[int]] = {}
    for reader, writers in before_writes.items():
        number = operators.index(reader)
        writes[number] = (*writes[number], len(values))
        for writer in writers:
            ordered.setdefault(writer, []).append(len(values))
        values.append(None)
        size.append(0)

    def value_of(node: fx.Node) -> int | None:
        return numbers.get(ops.view_base(node))

    def read(node: fx.Node | None) -> tuple[int, ...]:
        arguments = joint.forward_outputs if node is None else _memory_read(node)
        found = {value for argument in arguments if (value := value_of(argument)) is not None}
        if node is None:
            found = {value for value in found if value < token}
        elif node in joint.tangent_closure:
            found.add(token)
        if node is not None:
            found.update(ordered.get(node, ()))
        return tuple(sorted(found))

    runs_once = {
        number
        for number, node in enumerate(operators)
        if node is None
        or node in joint.tangent_closure
        or node in once
        or node in before_writes
        or any(item in once for item, _ in _born(node))
    }
    returned = (*joint.forward_outputs, *joint.backward_outputs, *joint.held_tangents)
    held = {value for node in returned if (value := value_of(node)) is not None}
    problem = Problem(
        reads=tuple(map(read, operators)),
        writes=tuple(writes),
        cost=tuple(0 if node is None else price(node) for node in operators),
        size=tuple(size),
        scratch=tuple(0 if node is None else scratch(node) for node in operators),
        order=tuple(range(len(operators))),
        once=frozenset(runs_once),
        held=frozenset(held),
        boundary=boundary,
        unsavable=frozenset(
            number for number, node in enumerate(values) if node is not None and node in rules.no_save
        ),
    )
    return TrainingStep(joint, rules, problem, tuple(operators), tuple(values))


def _readers_before_writes(joint: JointGraph, nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Operators that read memory which a later operator of the backward writes, with those that write it."""
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node in joint.tangent_closure and ops.is_mutating(node):
            for argument in written_arguments(node):
                writers.setdefault(ops.view_base(argument), []).append(node)
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes if writers else ():
        bases = dict.fromkeys(ops.view_base(argument) for argument in node.all_input_nodes)
        later = [w for base in bases for w in writers.get(base, ()) if joint.index[w] > joint.index[node]]
        if later:
            found[node] = later
    return found


def _is_operator(node: fx.Node) -> bool:
    return ops.kind(node) not in (Kind.INPUT, Kind.CONSTANT, Kind.VIEW, Kind.SYMBOLIC) and not ops.is_item(node)


def _memory_read(node: fx.Node) -> list[fx.Node]:
    return [argument for argument in node.all_input_nodes if ops.kind(argument) is not Kind.SYMBOLIC]


def _born(node: fx.Node) -> list[tuple[fx.Node | None, int]]:
    """The values that running an operator creates, each with its node and bytes."""
    if not isinstance(node.meta.get("val"), list | tuple):
        return [(node, owned_bytes(node))]
    return _leaves(node, node.meta["val"])


def _leaves(parent: fx.Node | None, results: Sequence[Any]) -> list[tuple[fx.Node | None, int]]:
    """The tensors in results, lists within them too, each with the item that takes it."""
    items: dict[Any, fx.Node] = {}
    for user in parent.users if parent is not None else ():
        if ops.is_item(user):
            items.setdefault(user.args[1], user)
    found: list[tuple[fx.Node | None, int]] = []
    for index, result in enumerate(results):
        if isinstance(result, list | tuple):
            found += _leaves(items.get(index), result)
        elif isinstance(result, torch.Tensor) or index in items:
            found.append((items.get(index), tensor_bytes(result)))
    return found


def _path(operator: fx.Node, item: fx.Node) -> list[fx.Node]:
    """The items from an operator's results down to this one."""
    path = [item]
    while path[-1].args[0] is not operator:
        parent = path[-1].args[0]
        assert isinstance(parent, fx.Node)
        path.append(parent)
    return path[::-1]
