"""The simulator: bytes alive at every step of forward and backward, for a plan with its schedule.

Views own nothing. Inputs, parameters and constants cost nothing: they were there before. All results of an
operator are born with it. Forward outputs live to the end of the step, since the caller holds them; saved values
to their last use in the backward; gradients to its end, since AOTAutograd returns them together; incoming
gradients from the start of the backward to their last use, a loss' to its end. What runs again makes new memory, which
later readers take.

This is what runs op by op; under Inductor `fused_memory` plays the kernels that it makes.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from remat import ops
from remat.costs import owned_bytes, tensor_bytes
from remat.joint import JointGraph
from remat.ops import Kind
from remat.plan import Plan
from remat.several import Memory

Scratch = Callable[[fx.Node], int]


class Role(enum.Enum):
    """What a piece of memory is there for."""

    OUTPUT = "forward output"
    SAVED = "saved"
    INCOMING = "incoming gradient"
    RECOMPUTED = "recomputed"
    TEMPORARY = "temporary"
    GRADIENT = "gradient"
    SCRATCH = "kernel scratch"


@dataclass(frozen=True)
class Life:
    """One piece of memory: the value's name, its role, its bytes, and the first and last step it is alive in."""

    name: str
    role: Role
    bytes: int
    born: int
    last: int


@dataclass(frozen=True)
class Timeline:
    """Bytes alive during each step; `names` holds the node run at each, forward first.

    `boundary_bytes` are alive between the two: forward outputs and saved values, which are `held_bytes`, and incoming
    gradients. `lives` is every piece of memory, by the order of its birth.
    """

    alive_bytes: tuple[int, ...]
    names: tuple[str, ...]
    forward_steps: int
    saved_bytes: int
    held_bytes: int
    boundary_bytes: int
    lives: tuple[Life, ...]

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes alive at any moment."""
        return max((self.boundary_bytes, *self.alive_bytes))

    @property
    def memory(self) -> Memory:
        """What a step of several graphs needs to know."""
        return Memory(self.peak_bytes, self.held_bytes)

    @property
    def peak_at(self) -> str:
        """The node during which the peak is reached first."""
        step = self._peak_step
        return "the start of the backward" if step is None else self.names[step]

    @property
    def alive_at_peak(self) -> tuple[Life, ...]:
        """What is alive at the peak, largest first."""
        step = self.forward_steps if self._peak_step is None else self._peak_step
        there = [life for life in self.lives if life.born <= step <= life.last and life.bytes]
        return tuple(sorted(there, key=lambda life: -life.bytes))

    @cached_property
    def _peak_step(self) -> int | None:
        return self.alive_bytes.index(self.peak_bytes) if self.peak_bytes in self.alive_bytes else None


def simulate(plan: Plan, scratch: Scratch | None = None) -> Timeline:
    """Play a plan's forward and backward op by op.

    `scratch` gives the bytes that an operator's kernel takes for itself while it runs.
    """
    joint = plan.joint
    forward = [node for node in plan.forward if node.op == "call_function"]
    held = {ops.view_base(node) for node in joint.forward_outputs}
    saved = {ops.view_base(node) for node in plan.saved}
    gradients = {ops.view_base(node) for node in joint.backward_outputs}
    tangents = {node for node in joint.tangents if node.users}
    to_the_end = (held & saved) | gradients | set(joint.held_tangents)
    passed = sorted(saved | tangents, key=joint.index.__getitem__)
    lasting = dict.fromkeys(saved, Role.SAVED) | dict.fromkeys(held, Role.OUTPUT)
    again = dict.fromkeys((n for n in plan.backward if n not in joint.tangent_closure), Role.RECOMPUTED)
    ending = dict.fromkeys(gradients, Role.GRADIENT)
    first = _Pass(_facts(joint), forward, (), held | saved, lasting | ending, scratch)
    second = _Pass(_facts(joint), plan.backward, passed, to_the_end, again | ending, scratch)
    start, end = len(forward), len(forward) + len(plan.backward) - 1
    # What the caller holds and the backward computes again is there twice.
    only_held = sorted(held - saved, key=joint.index.__getitem__)
    returned = [life for node in only_held if (life := _held(node, start, end)).bytes]
    lives = [*first.lives(), *returned]
    lives += [replace(life, born=life.born + start, last=life.last + start) for life in second.lives()]
    alive = alive_at_each([life for life in lives if life.role is not Role.SCRATCH], end + 1)
    for life in lives:
        if life.role is Role.SCRATCH:
            alive[life.born] += life.bytes
    return Timeline(
        tuple(alive),
        call_names(plan) + plan.backward_names,
        len(forward),
        sum(map(_storage_bytes, saved)),
        sum(map(_storage_bytes, saved)) + sum(life.bytes for life in returned),
        sum(map(_storage_bytes, passed)) + sum(life.bytes for life in returned),
        tuple(lives),
    )


def call_names(plan: Plan) -> tuple[str, ...]:
    named = zip(plan.forward, plan.forward_names, strict=True)
    return tuple(name for node, name in named if node.op == "call_function")


def _held(node: fx.Node, start: int, end: int) -> Life:
    return Life(node.name, Role.OUTPUT, _storage_bytes(node), start, end)


def alive_at_each(lives: Iterable[Life], steps: int) -> list[int]:
    change = [0] * (steps + 1)
    for life in lives:
        if life.last >= life.born:
            change[life.born] += life.bytes
            change[life.last + 1] -= life.bytes
    return list(itertools.accumulate(change[:steps]))


def _storage_bytes(node: fx.Node) -> int:
    """Bytes of one storage: a plain node's result, or the one item of an operator with several."""
    if ops.kind(node) in (Kind.CONSTANT, Kind.SYMBOLIC) or (node.op == "placeholder" and not _is_tangent(node)):
        return 0
    return tensor_bytes(node.meta.get("val"))


def _is_tangent(node: fx.Node) -> bool:
    return "tangents" in str(node.target)


class _Facts:
    """What the simulator asks of a node again and again, looked up once for each joint graph."""

    def __init__(self, joint: JointGraph) -> None:
        self.base = {node: ops.view_base(node) for node in joint.nodes}
        self.read = {node: tuple(dict.fromkeys(self.base[a] for a in node.all_input_nodes)) for node in joint.nodes}
        self.owned = {node: owned_bytes(node) for node in joint.nodes}
        self.items = {
            node: [(index, tensor_bytes(item)) for index, item in enumerate(value) if isinstance(item, torch.Tensor)]
            for node in joint.nodes
            if isinstance(value := node.meta.get("val"), list | tuple) and not ops.is_view(node)
        }
        self.is_item = {node for node in joint.nodes if ops.is_item(node)}


@functools.lru_cache(maxsize=4)
def _facts(joint: JointGraph) -> _Facts:
    return _Facts(joint)


@dataclass(frozen=True, eq=False)
class _Pass:
    """One of the two graphs, in the order it runs; a node may run more than once.

    before: the memory that is there at the start. forever: what lives to the end, in its newest version.
    """

    facts: _Facts
    order: Sequence[fx.Node]
    before: Iterable[fx.Node]
    forever: set[fx.Node]
    roles: dict[fx.Node, Role]
    scratch: Scratch | None

    def lives(self) -> list[Life]:
        """Every piece of memory: born at or before a step, not yet past its last use."""
        newest: dict[fx.Node, int] = {}  # by the node that owns memory: its place in `found`
        found: list[Any] = []
        for node in self.before:
            newest[node] = len(found)
            found.append([node, _storage_bytes(node), 0, -1, Role.INCOMING if _is_tangent(node) else Role.SAVED])
        facts = self.facts
        for step, node in enumerate(self.order):
            for base in facts.read[node]:
                place = newest.get(base)
                if place is not None:
                    found[place][3] = step
            born = self._born(node, step)
            if node not in facts.is_item:
                newest.pop(node, None)
            if not born:
                continue
            # A result lives at least as long as the tuple that it came in.
            last = max([step, *self._readers[step]]) if len(born) > 1 else step
            for storage, size in born:
                newest[storage] = len(found)
                found.append([storage, size, step, last, self.roles.get(storage, Role.TEMPORARY)])
        end = len(self.order) - 1
        for node in self.forever & newest.keys():
            found[newest[node]][3] = end
        lives = [Life(node.name, role, size, born, last) for node, size, born, last, role in found]
        if self.scratch is not None:
            lives += [
                Life(node.name, Role.SCRATCH, size, step, step)
                for step, node in enumerate(self.order)
                if (size := self.scratch(node))
            ]
        return lives

    @cached_property
    def _readers(self) -> list[list[int]]:
        """For each step the steps that read its node as it was made there."""
        readers: list[list[int]] = [[] for _ in self.order]
        newest: dict[fx.Node, int] = {}
        for step, node in enumerate(self.order):
            for argument in node.all_input_nodes:
                if argument in newest:
                    readers[newest[argument]].append(step)
            newest[node] = step
        return readers

    def _born(self, node: fx.Node, step: int) -> list[tuple[fx.Node, int]]:
        """Storages that running this node creates, with their bytes; a result that nobody takes is the tuple's."""
        items = self.facts.items.get(node)
        if items is None:
            size = self.facts.owned[node]
            return [(node, size)] if size else []
        readers = [self.order[reader] for reader in self._readers[step]]
        taken = {user.args[1]: user for user in readers if user in self.facts.is_item}
        return [(taken.get(index, node), size) for index, size in items]
