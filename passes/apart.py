"""Keep a matmul where the plan has it, which Inductor would move to the addition of its result.

Inductor makes `addmm(c, a, b)` of `add(mm(a, b), c)`, at the place of the addition. With tied embeddings the matmul of
the weight's gradient moves from the start of the backward to its end, and the gradient of the logits lives as long:
8 MiB of 33 at the peak of a GPT-2 of two layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import fx

from remat import ops
from remat.costs import owned_bytes
from remat.ops import Kind
from remat.passes.normalize import copy_module
from remat.passes.partition import Partition

aten = torch.ops.aten
FREE: Final = (Kind.VIEW, Kind.SYMBOLIC, Kind.CONSTANT)


def keep_matmuls_apart(partition: Partition) -> Partition:
    """Where moving a matmul of the backward would keep more alive than its result takes, say `c + mm` as `c - (-mm)`.

    Bit for bit the same, the negation inlined into the subtraction, and no pattern of Inductor's.
    """
    module = copy_module(partition.backward)
    order = list(module.graph.nodes)
    place = {node: number for number, node in enumerate(order)}
    for node in order:
        if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        for product, other in (node.args, reversed(node.args)):
            if _is_product(product) and isinstance(other, fx.Node) and _keeps_memory(product, node, order, place):
                _subtract_the_negative(product, other, node)
                break
    module.recompile()
    return replace(partition, backward=module)


def _is_product(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.mm.default and len(node.users) == 1


def _keeps_memory(product: fx.Node, addition: fx.Node, order: list[fx.Node], place: dict[fx.Node, int]) -> bool:
    """Whether the matmul reads more memory than it makes, free by the addition otherwise; and something is between."""
    between = order[place[product] + 1 : place[addition]]
    if all(ops.kind(node) in FREE for node in between):
        return False
    freed = sum(
        owned_bytes(base)
        for base in {ops.view_base(argument) for argument in product.all_input_nodes}
        if base.op != "placeholder" and _last_reader(base, place) < place[addition]
    )
    return freed > owned_bytes(product)


def _last_reader(base: fx.Node, place: dict[fx.Node, int]) -> int:
    """The place of the last node that reads a piece of memory, through whatever views."""
    last, pending = place[base], [base]
    while pending:
        node = pending.pop()
        for user in node.users:
            last = max(last, place[user])
            if ops.is_view(user):
                pending.append(user)
    return last


def _subtract_the_negative(product: fx.Node, other: fx.Node, addition: fx.Node) -> None:
    graph = addition.graph
    with graph.inserting_before(addition):
        negative = graph.call_function(aten.neg.default, (product,))
        result = graph.call_function(aten.sub.Tensor, (other, negative))
    negative.meta, result.meta = dict(product.meta), dict(addition.meta)
    addition.replace_all_uses_with(result)
    graph.erase_node(addition)
