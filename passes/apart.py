"""Keep a matmul where the plan has it, which Inductor would move to the addition of its result.

Inductor makes `addmm(c, a, b)` of `add(mm(a, b), c)`, at the place of the addition. With tied embeddings the matmul of
the weight's gradient moves from the start of the backward to its end, and the gradient of the logits lives as long:
8 MiB of 33 at the peak of a GPT-2 of two layers.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import fx

from remat import ops
from remat.ops import Kind
from remat.passes.normalize import copy_module
from remat.passes.partition import Partition

aten = torch.ops.aten
# Kinds of operators that run outside of generated kernels.
OUTSIDE: Final = (Kind.CONTRACTION, Kind.EXTERN)


def keep_matmuls_apart(partition: Partition) -> Partition:
    """Where an operator outside of the kernels runs between a matmul of the backward and the addition, keep it there.

    If the other summand is a matmul that stays where it is, it is named second, which Inductor takes; else `c + mm`
    becomes `c - (-mm)`: bit for bit the same, the negation inlined into the subtraction, and no pattern of Inductor's.
    """
    module = copy_module(partition.backward)
    order = list(module.graph.nodes)
    outside = [number for number, node in enumerate(order) if ops.kind(node) in OUTSIDE]
    place = {node: number for number, node in enumerate(order)}

    def moves(node: object, addition: fx.Node) -> bool:
        return _is_product(node) and is_moved(place[node], place[addition], outside)

    for node in order:
        if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        for product, other in (node.args, node.args[::-1]):
            if moves(product, node) and isinstance(other, fx.Node):
                if _is_product(other) and not moves(other, node):
                    node.args = (product, other)
                else:
                    _subtract_the_negative(product, other, node)
                break
    module.recompile()
    return replace(partition, backward=module)


def is_moved(product: int, addition: int, outside: Sequence[int]) -> bool:
    """Whether one of the growing places `outside` lies between those of a product and of its addition."""
    return bisect.bisect(outside, product) < bisect.bisect_left(outside, addition)


def _is_product(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.mm.default and len(node.users) == 1


def _subtract_the_negative(product: fx.Node, other: fx.Node, addition: fx.Node) -> None:
    graph = addition.graph
    with graph.inserting_before(addition):
        negative = graph.call_function(aten.neg.default, (product,))
        result = graph.call_function(aten.sub.Tensor, (other, negative))
    negative.meta, result.meta = dict(product.meta), dict(addition.meta)
    addition.replace_all_uses_with(result)
    graph.erase_node(addition)
