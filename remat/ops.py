"""What remat knows about operators: purity, aliasing, and what kind of kernel Inductor makes of them."""

from __future__ import annotations

import enum
import functools
import operator
from typing import Any, Final

import torch
from torch import fx

from remat import registry, torch_internals

aten = torch.ops.aten
prims = torch.ops.prims


class Kind(enum.Enum):
    """How a node comes to be at run time."""

    INPUT = "input"
    CONSTANT = "constant"
    VIEW = "view"
    SYMBOLIC = "symbolic"
    FACTORY = "factory"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    CONTRACTION = "contraction"
    EXTERN = "extern"


# Views whose schema does not say so: functionalization has removed the alias, the storage is shared all the same.
_UNANNOTATED_VIEWS: Final = frozenset({aten._unsafe_view.default, aten.reshape.default})

# Make a value from nothing but sizes: cheaper to make again than to keep, so never saved.
_FACTORIES: Final = frozenset(
    {
        aten.full.default, aten.full_like.default, aten.zeros.default, aten.ones.default,
        aten.zeros_like.default, aten.ones_like.default, aten.empty.memory_format, aten.empty_like.default,
        aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
        aten.empty_strided.default, aten.new_empty_strided.default, aten.scalar_tensor.default,
        aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default, aten.eye.m,
        prims.iota.default, aten.lift_fresh_copy.default,
    }
)

# Lowered by Inductor to loops that fuse with their neighbours, though torch does not tag them pointwise.
_FUSED_LIKE_POINTWISE: Final = frozenset(
    {
        prims.convert_element_type, aten._to_copy, aten.clone, aten.where, aten.cat, aten.index, aten.gather,
        aten.embedding, aten.constant_pad_nd, aten.slice_scatter, aten.select_scatter, aten._unsafe_index,
        aten.masked_fill, aten.flip, aten.roll, aten.repeat, aten.triu, aten.tril, aten._unsafe_masked_index,
        aten.copy, prims.inductor_random, prims.inductor_lookup_seed, prims.inductor_randint,
        prims.fma, aten.native_dropout, aten.rand, aten.randn, aten.bernoulli,
        prims._low_memory_max_pool_offsets_to_indices,
    }
)
_REDUCTIONS: Final = frozenset(
    {
        aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.prod, aten.var, aten.var_mean,
        aten.std, aten.any, aten.all, aten.argmax, aten.argmin, aten.logsumexp, aten._softmax,
        aten._log_softmax, prims.sum, prims.var, prims.prepare_softmax_online, aten.avg_pool2d,
        aten.max_pool2d_with_indices, prims._low_memory_max_pool_with_offsets, aten._adaptive_avg_pool2d,
        aten.native_layer_norm, aten.native_group_norm, aten._native_batch_norm_legit,
    }
)
_CONTRACTION_WORDS: Final = ("attention", "convolution", "_linear", "grouped_mm", "int_mm")
_CONTRACTIONS: Final = frozenset(
    {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv, aten.mv, aten.dot, aten._scaled_mm}
)
# Costly per element on a CPU: a polynomial of some ten to thirty instructions each.
_TRANSCENDENTAL: Final = frozenset(
    {
        aten.exp, aten.exp2, aten.expm1, aten.log, aten.log2, aten.log10, aten.log1p, aten.tanh, aten.sigmoid,
        aten.erf, aten.erfc, aten.erfinv, aten.sin, aten.cos, aten.tan, aten.asin, aten.acos, aten.atan,
        aten.atan2, aten.sinh, aten.cosh, aten.pow, aten.gelu, aten.silu, aten.softplus, aten.lgamma,
        aten.digamma, aten.mish, prims.inductor_random, prims.inductor_randint, aten.native_dropout,
    }
)
_PURE_NAMESPACES: Final = frozenset({"aten", "prims", "prim", "mkldnn", "mkl", "onednn", "quantized"})


def name(node: fx.Node) -> str:
    """The operator as users write it in settings: `aten.mm.default`; the node's kind for what is no operator."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if torch_internals.is_higher_order(target):
        return f"higher_order.{target.name()}"  # type: ignore[union-attr]
    return getattr(target, "__name__", node.op) if node.op == "call_function" else node.op


def is_named(node: fx.Node, names: tuple[str, ...]) -> bool:
    """Whether one of these names means this node's operator, with its overload or without."""
    full = name(node)
    return full in names or full.rpartition(".")[0] in names


def is_item(node: fx.Node) -> bool:
    """Whether the node takes one item out of an operator's tuple of results."""
    return node.op == "call_function" and node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """Whether the node owns no memory: a view of its first tensor argument, or an item of a list of views."""
    if is_item(node):
        parent = node.args[0]
        return isinstance(parent, fx.Node) and is_view(parent)
    return node.op == "call_function" and _returns_alias(node.target)


@functools.cache
def _returns_alias(target: Any) -> bool:
    if target in _UNANNOTATED_VIEWS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return any(result.alias_info is not None for result in target._schema.returns)


def view_base(node: fx.Node) -> fx.Node:
    """The node whose memory this node shows: itself, unless it is a view."""
    while is_view(node):
        node = next(argument for argument in node.all_input_nodes if not torch_internals.is_sym_node(argument))
    return node


def is_mutating(node: fx.Node) -> bool:
    """Whether the operator's schema says that it writes one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether running the node takes numbers from a generator, so that a second run gives others.

    Attention carries the random tag at every dropout probability; with probability 0 it draws nothing.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target in torch_internals.SEEDED_OPERATORS:
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return target.namespace == "rngprims"
    arguments: dict[str, Any] = dict(node.kwargs)
    for declared, given in zip(target._schema.arguments, node.args, strict=False):
        arguments[declared.name] = given
    for declared in target._schema.arguments:
        if declared.name == "dropout_p":
            return bool(arguments.get("dropout_p", declared.default_value) != 0)
    return True


def impurity(node: fx.Node, declared_pure: tuple[str, ...] = ()) -> str | None:
    """Why running this node a second time might not give the same value, or have an effect; None if pure.

    `declared_pure` names the operators that the user vouches for (setting `recompute_ops`).
    """
    target = node.target
    if node.op != "call_function" or is_item(node):
        return None
    if is_mutating(node):
        return "writes its argument"
    if draws_random_numbers(node):
        return "draws random numbers"
    if torch_internals.has_unbacked_bindings(node):
        return "its size depends on data"
    if torch_internals.is_higher_order(target):
        return None if is_named(node, declared_pure) else "higher-order operator"
    if not isinstance(target, torch._ops.OpOverload):
        return None  # Python arithmetic on sizes
    if target.namespace.startswith("_c10d") or target.namespace == "c10d":
        return "collective: every rank must run it equally often"
    known = target.namespace in _PURE_NAMESPACES or registry.is_declared_pure(target)
    if not known and not is_named(node, declared_pure):
        return "custom operator of unknown purity (see remat.register_op and recompute_ops)"
    return None


def kind(node: fx.Node) -> Kind:
    """How this node comes to be at run time."""
    if node.op == "placeholder":
        return Kind.INPUT
    if node.op == "get_attr":
        return Kind.CONSTANT
    if torch_internals.is_sym_node(node):
        return Kind.SYMBOLIC
    if is_view(node):
        return Kind.VIEW
    if is_item(node) and isinstance(node.args[0], fx.Node):
        return kind(node.args[0])
    return _kind_of_target(node.target)


@functools.cache
def _kind_of_target(target: Any) -> Kind:
    if not isinstance(target, torch._ops.OpOverload):
        return Kind.EXTERN
    packet = target.overloadpacket
    if target in _FACTORIES:
        return Kind.FACTORY
    if packet in _REDUCTIONS and not (packet in (aten.max, aten.min) and target._overloadname == "other"):
        return Kind.REDUCTION
    if torch.Tag.pointwise in target.tags or packet in _FUSED_LIKE_POINTWISE:
        return Kind.POINTWISE
    if packet in _CONTRACTIONS or any(word in packet.__name__ for word in _CONTRACTION_WORDS):
        return Kind.CONTRACTION
    return Kind.EXTERN


def is_transcendental(node: fx.Node) -> bool:
    """Whether the operator costs tens of instructions an element, not one."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is aten.pow:
        return not (len(node.args) > 1 and node.args[1] in (1, 2, 3, 0.5, -1, -2))
    return packet in _TRANSCENDENTAL


def is_fusible(producer: fx.Node, consumer: fx.Node) -> bool:
    """Whether Inductor can compute `producer` inside the kernel of `consumer`, so that it is never written."""
    return kind(producer) in (Kind.POINTWISE, Kind.FACTORY) and kind(consumer) in (
        Kind.POINTWISE,
        Kind.REDUCTION,
    )


def user_source(node: fx.Node) -> str:
    """The user's line that made this node, as `file:line, code`; empty where torch recorded none."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return ""
    lines = [line.strip() for line in str(trace).splitlines() if line.strip()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("File "):
            where = lines[index].removeprefix("File ").split(", in ")[0].replace('", line ', ":").strip('"')
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{where}, {code}" if code else where
    return ""
