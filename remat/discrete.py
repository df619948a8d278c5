"""Values that jump: integers and truths made from floats, where a difference in the last bit changes the result.

A recomputed reduction may differ from the forward's in its last bits, since Inductor compiles the two apart. A sum
that is off by 1e-7 does no harm, but a top-k, an argmax or a threshold on it may choose another expert, and the
gradient then belongs to a step that was never taken (pytorch#186572). These small values are saved.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from remat import ops
from remat.costs import tensors_of

aten = torch.ops.aten

# Operators whose integer or boolean argument decides where elements go, or how many there are.
_ROUTES: Final = frozenset(
    {
        aten.index, aten.index_put, aten._unsafe_index, aten._unsafe_index_put, aten.gather, aten.scatter,
        aten.scatter_add, aten.scatter_reduce, aten.index_select, aten.index_add, aten.index_copy, aten.embedding,
        aten.take, aten.cumsum, aten.nonzero, aten.masked_select, aten.bincount, aten.sort, aten.argsort, aten.topk,
        aten.searchsorted, aten.bucketize, aten._grouped_mm, aten._unsafe_masked_index,
    }
)  # fmt: skip


# Their integer results are made from their integer arguments, the floats do not matter; but for the mode "max".
_INTEGERS_FROM_INTEGERS: Final = frozenset({aten._embedding_bag, aten._embedding_bag_forward_only})
_BAG_MODE: Final = 4  # the argument's place
_BAG_MAXIMUM: Final = 2


def _is_maximum(bag: fx.Node) -> bool:
    return len(bag.args) > _BAG_MODE and bool(bag.args[_BAG_MODE] == _BAG_MAXIMUM)


def is_discrete(node: fx.Node) -> bool:
    """Whether the node's one tensor holds integers or truths."""
    tensors = tensors_of(node.meta.get("val"))
    return len(tensors) == 1 and not (tensors[0].dtype.is_floating_point or tensors[0].dtype.is_complex)


def jumps(node: fx.Node) -> bool:
    """Whether last bits decide this value, and it decides where elements go: then it is not to be made twice.

    A truth that only selects between two values (a ReLU's mask) may be recomputed: where it flips, they are equal.
    """
    if not is_discrete(node) or ops.is_view(node):
        return False
    source = node.args[0] if ops.is_item(node) else node
    if not isinstance(source, fx.Node) or not any(_has_floats(argument) for argument in source.all_input_nodes):
        return False
    if getattr(source.target, "overloadpacket", None) in _INTEGERS_FROM_INTEGERS and not _is_maximum(source):
        return False
    return tensors_of(node.meta["val"])[0].dtype is not torch.bool or _routes(node)


def _has_floats(node: fx.Node) -> bool:
    return any(tensor.dtype.is_floating_point for tensor in tensors_of(node.meta.get("val")))


def _routes(node: fx.Node) -> bool:
    """Whether this value reaches, through integers and truths alone, an operator that it routes."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if getattr(user.target, "overloadpacket", None) in _ROUTES:
                return True
            if user not in seen and is_discrete(user):
                seen.add(user)
                pending.append(user)
    return False
