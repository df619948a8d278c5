"""A plan: which values to save, and the order of the backward. Data only: solvers make it, passes write it out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from remat import ops
from remat.joint import JointGraph


@dataclass(frozen=True, eq=False)
class Plan:
    """What to save and when to recompute.

    saved: values passed from forward to backward, in graph order (inputs that the backward reads among them).
    backward: the nodes that the backward runs, in order; a forward value among them is recomputed there.
    solver: who proposed it ("torch", "cut", "random", ...), for the report.
    """

    joint: JointGraph
    saved: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    solver: str

    @property
    def recomputed(self) -> tuple[fx.Node, ...]:
        """Operators that run in the forward and again in the backward; views and sizes, which are free, left out."""
        forward = self.forward_set
        free = (ops.Kind.VIEW, ops.Kind.SYMBOLIC, ops.Kind.CONSTANT, ops.Kind.INPUT)
        return tuple(
            n for n in self.backward if n in forward and not ops.is_item(n) and ops.kind(n) not in free
        )

    @property
    def forward_set(self) -> frozenset[fx.Node]:
        """The nodes that the forward runs under this plan."""
        return frozenset(self.joint.ancestors(list(self.saved))) | self.joint.required_forward


def make_plan(joint: JointGraph, saved: list[fx.Node], solver: str) -> Plan:
    """Order the backward for a set of saved values: everything as late as possible (see backward_order)."""
    ordered = tuple(sorted(set(saved), key=joint.index.__getitem__))
    backward = backward_order(joint, ordered)
    used = {argument for node in backward for argument in node.all_input_nodes}
    used.update(joint.backward_outputs)
    return Plan(joint, tuple(node for node in ordered if node in used), backward, solver)


def backward_order(joint: JointGraph, saved: Collection[fx.Node]) -> tuple[fx.Node, ...]:
    """The backward's nodes, each recomputed value placed just before its first use.

    Nodes of the tangent closure keep the joint graph's order, which is the autograd engine's; what they need is put
    before them in graph order, and the items of a tuple right after the operator that makes it, so that the unused
    ones die at once. Placing recomputation late keeps one stretch of it alive at a time (cf. torch's
    reordering_to_mimic_autograd_engine).
    """
    order: list[fx.Node] = []
    placed: set[fx.Node] = set(saved)

    def place(root: fx.Node) -> None:
        pending = joint.ancestors([root], placed)
        for node in sorted(pending, key=joint.index.__getitem__):
            if node.op == "placeholder":
                placed.add(node)
                continue
            order.append(node)
            placed.add(node)

    for node in joint.nodes:
        if node in joint.tangent_closure and node.op != "placeholder":
            place(node)
    for node in joint.backward_outputs:
        place(node)
    return tuple(_items_first(order))


def _items_first(order: list[fx.Node]) -> list[fx.Node]:
    """Move each item of a tuple to right after its operator, as far as the item runs in this order at all."""
    present = set(order)
    done: set[fx.Node] = set()
    result: list[fx.Node] = []

    def emit(node: fx.Node) -> None:
        done.add(node)
        result.append(node)
        if isinstance(node.meta.get("val"), list | tuple):
            for user in node.users:
                if ops.is_item(user) and user in present and user not in done:
                    emit(user)

    for node in order:
        if node not in done:
            emit(node)
    return result

