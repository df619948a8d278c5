"""The simulator: bytes alive at every step of forward and backward, for a plan with its schedule.

Views own nothing. Inputs, parameters and constants cost nothing: they were there before. All results of an
operator are born with it. Forward outputs live to the end of the step, since the caller holds them; saved values
to their last use in the backward; gradients to its end, since AOTAutograd returns them together; incoming
gradients from the start of the backward to their last use.

Fused (Inductor), a pointwise value whose readers can all compute it in their own kernels is never written: it
takes no memory, and what it is computed from lives until those readers have run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from remat import ops
from remat.costs import owned_bytes, tensor_bytes
from remat.ops import Kind
from remat.plan import Plan


@dataclass(frozen=True)
class Timeline:
    """Bytes alive during each step; `names` holds the node run at each, forward first.

    `boundary_bytes` are alive between the two: forward outputs, saved values, incoming gradients.
    """

    alive_bytes: tuple[int, ...]
    names: tuple[str, ...]
    forward_steps: int
    saved_bytes: int
    boundary_bytes: int

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes alive at any moment."""
        return max((self.boundary_bytes, *self.alive_bytes))

    @property
    def peak_at(self) -> str:
        """The node during which the peak is reached first."""
        if self.peak_bytes in self.alive_bytes:
            return self.names[self.alive_bytes.index(self.peak_bytes)]
        return "the start of the backward"


def simulate(plan: Plan, fused: bool) -> Timeline:
    """Play a plan's forward and backward, under Inductor (`fused`) or op by op."""
    joint = plan.joint
    forward = [node for node in plan.forward if node.op == "call_function"]
    held = {ops.view_base(node) for node in joint.forward_outputs}
    saved = {ops.view_base(node) for node in plan.saved}
    gradients = {ops.view_base(node) for node in joint.backward_outputs}
    tangents = {node for node in joint.tangents if node.users}
    passed = sorted(saved | tangents, key=joint.index.__getitem__)
    # What the caller holds and the backward computes again is there twice.
    held_only = sum(map(_storage_bytes, held - saved))
    first = _Pass(forward, fused, before=(), forever=held | saved)
    second = _Pass(plan.backward, fused, before=passed, forever=(held & saved) | gradients)
    names = [node.name for node in (*forward, *plan.backward)]
    return Timeline(
        (*first.alive_bytes(), *(count + held_only for count in second.alive_bytes())),
        tuple(names),
        len(forward),
        sum(map(_storage_bytes, saved)),
        sum(map(_storage_bytes, passed)) + held_only,
    )


def _storage_bytes(node: fx.Node) -> int:
    """Bytes of one storage: a plain node's result, or the one item of an operator with several."""
    if ops.kind(node) in (Kind.CONSTANT, Kind.SYMBOLIC) or (node.op == "placeholder" and not _is_tangent(node)):
        return 0
    return tensor_bytes(node.meta.get("val"))


def _is_tangent(node: fx.Node) -> bool:
    return "tangents" in str(node.target)


@dataclass(frozen=True)
class _Pass:
    """One of the two graphs, in the order it runs."""

    order: Sequence[fx.Node]
    fused: bool
    before: Iterable[fx.Node]
    forever: set[fx.Node]

    def alive_bytes(self) -> list[int]:
        """Bytes alive while each node runs: born at or before it, not yet past their last use."""
        position = {node: step for step, node in enumerate(self.order)}
        runs_at = self._kernel_steps(position)
        last: dict[fx.Node, int] = {}
        for node in self.order:
            for argument in node.all_input_nodes:
                base = ops.view_base(argument)
                last[base] = max(last.get(base, -1), runs_at[node])
        end = len(self.order) - 1
        lives = [(node, _storage_bytes(node), 0, last.get(node, -1)) for node in self.before]
        for node, step in position.items():
            for storage, size in self._born(node, position):
                if runs_at[node] == step or storage in self.forever:  # else it is inside a later kernel, never written
                    # A result lives at least as long as the tuple that it came in.
                    lives.append((storage, size, step, max(last.get(storage, step), last.get(node, step), step)))
        lives = [(node, size, born, end if node in self.forever else dies) for node, size, born, dies in lives]
        change = [0] * (len(self.order) + 1)
        for _, size, born, dies in lives:
            change[born] += size
            change[dies + 1] -= size
        return list(itertools.accumulate(change[: len(self.order)]))

    def _born(self, node: fx.Node, position: dict[fx.Node, int]) -> list[tuple[fx.Node, int]]:
        """Storages that running this node creates, with their bytes; a result that nobody takes is the tuple's."""
        value = node.meta.get("val")
        if not isinstance(value, list | tuple):
            size = owned_bytes(node)
            return [(node, size)] if size else []
        if ops.is_view(node):
            return []
        taken = {user.args[1]: user for user in node.users if ops.is_item(user) and user in position}
        return [
            (taken.get(index, node), tensor_bytes(item))
            for index, item in enumerate(value)
            if isinstance(item, torch.Tensor)
        ]

    def _kernel_steps(self, position: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """The step at which each node's arguments are last read: its own, or its readers' if it is inlined there."""
        steps = dict(position)
        if not self.fused:
            return steps
        loops: set[fx.Node] = set()  # nodes that a pointwise producer can be inlined into
        for node in reversed(self.order):
            kind = ops.kind(node)
            readers = [user for user in node.users if user in position]
            kept = node in self.forever or ops.view_base(node) in self.forever
            absorbed = bool(readers) and not kept and all(user in loops for user in readers)
            if kind in (Kind.POINTWISE, Kind.REDUCTION) or (kind is Kind.VIEW and absorbed):
                loops.add(node)
            if absorbed and kind in (Kind.POINTWISE, Kind.VIEW, Kind.FACTORY):
                steps[node] = max(steps[user] for user in readers)
        return steps
