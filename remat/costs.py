"""What saving and recomputing cost: bytes by storage, seconds by a roofline.

Seconds of one node: the largest of its FLOPs over the device's rate, the bytes it moves over the bandwidth, and
its pointwise results over their rate, plus a launch (Williams et al., "Roofline", CACM 2009). A pointwise node lives
inside the kernel of its consumer and moves nothing by itself, as under Inductor. The prices are the same when the
graphs run op by op, so that `inner` does not change the plan it is meant to debug.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from remat import ops, torch_internals
from remat.devices import Device
from remat.joint import JointGraph
from remat.ops import Kind
from remat.settings import Settings
from remat.torch_internals import CheckpointPolicy

# What a symbolic size counts as. Most prices scale alike in it, so its value decides little; it is larger than the
# constants it meets (heads, groups), and it is the same in every process, as the sizes at hand are not.
NOMINAL_SIZE: Final = 1024
# What a preference of a checkpoint policy multiplies the other choice's price by. A judgement, not a measurement: it
# should turn a choice that is close, and not one between a norm and a matmul.
PREFERENCE: Final = 4.0
# How much dearer a FLOP is taken in plans for a peak than its share of the peak rate. At weight 1 a model whose matmuls
# are small recomputes those first: Mamba of width 64 ran 3.4 forwards again over PyTorch's nine budgets, where PyTorch
# runs 1.0, and moved 0.63 of its bytes; at 8 it was 0.17 and 0.65. Ten other models gained in FLOPs too.
ALONE_FLOP_WEIGHT: Final = 7.0
FEMTOSECONDS: Final = 10**15
MIB: Final = 2**20


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's value: one, or those in its tuple."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def elements(tensor: torch.Tensor) -> int:
    """Number of elements; symbolic sizes at their nominal value."""
    return torch_internals.nominal_size(tensor.numel(), NOMINAL_SIZE)


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in a node's value, as if each owned its memory."""
    return sum(elements(tensor) * tensor.dtype.itemsize for tensor in tensors_of(value))


def owned_bytes(node: fx.Node) -> int:
    """Bytes of memory that exist because this node ran: 0 for views, inputs, constants, items and sizes."""
    if ops.is_item(node) or ops.kind(node) in (Kind.INPUT, Kind.CONSTANT, Kind.VIEW, Kind.SYMBOLIC):
        return 0
    return 0 if ops.is_mutating(node) else tensor_bytes(node.meta.get("val"))


def moved_bytes(node: fx.Node) -> int:
    """Bytes that an operator reads and writes when it runs by itself."""
    return tensor_bytes(node.meta.get("val")) + sum(tensor_bytes(a.meta.get("val")) for a in node.all_input_nodes)


def saved_bytes(node: fx.Node) -> int:
    """Bytes that saving this node keeps: its tensor's, unless the memory is an input's or a constant's."""
    base = ops.view_base(node)
    return 0 if ops.kind(base) in (Kind.INPUT, Kind.CONSTANT, Kind.SYMBOLIC) else tensor_bytes(base.meta.get("val"))


def _cpu_flash_flops(query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> int:
    # torch's counter gives the CPU flash operator 0: two products of n x m x d, 2 FLOPs each.
    batch, heads, rows, depth = query.shape
    return 4 * batch * heads * rows * key.shape[2] * depth


_EXTRA_FLOPS: Final[dict[Any, Callable[..., int]]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_flash_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, query, key, *_, **__: _cpu_flash_flops(query, key) * 5 // 2
    ),
}


def flops(node: fx.Node) -> int:
    """FLOPs of one node by torch's counter, plus the CPU attention that it does not know; 0 for the rest."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in _EXTRA_FLOPS and packet not in flop_registry:
        return 0
    arguments, keywords = torch.utils._pytree.tree_map(_hinted, (node.args, node.kwargs))
    return call_flops(packet, arguments, keywords, _hinted(node))


def call_flops(packet: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> int:
    """FLOPs of calling an operator (`aten.mm`) with tensors of concrete sizes, to this result."""
    if packet in _EXTRA_FLOPS:
        return _EXTRA_FLOPS[packet](*arguments, **keywords)
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*arguments, **keywords, out_val=result))


def _sizes(node: fx.Node) -> list[int]:
    return [torch_internals.nominal_size(size, NOMINAL_SIZE) for size in node.meta["val"].shape]


def _hinted(value: Any) -> Any:
    """A node's value with concrete sizes, on the meta device: the counter must not see symbols."""
    if not isinstance(value, fx.Node):
        return value
    result = value.meta.get("val")
    if isinstance(result, torch.Tensor):
        return torch.empty(_sizes(value), dtype=result.dtype, device="meta")
    if isinstance(result, list | tuple):
        return type(result)(
            torch.empty([torch_internals.nominal_size(s, NOMINAL_SIZE) for s in item.shape], device="meta")
            if isinstance(item, torch.Tensor)
            else item
            for item in result
        )
    if torch_internals.is_sym_node(value):
        return torch_internals.nominal_size(result, NOMINAL_SIZE) if isinstance(result, int | torch.SymInt) else result
    return result


def _reduced(node: fx.Node) -> tuple[int, bool]:
    """What a reduction reduces, however it is spelled: elements for each result, and whether along the last axis."""
    values = [tensor for argument in node.all_input_nodes[:1] for tensor in tensors_of(argument.meta.get("val"))]
    results = tensors_of(node.meta.get("val"))
    if not values or not results:
        return 0, True
    value = values[0]
    axes = node.args[1] if len(node.args) > 1 else None
    listed = [axes] if isinstance(axes, int) else axes
    numbers = [a % value.ndim for a in listed if isinstance(a, int)] if isinstance(listed, list | tuple) else []
    return elements(value) // max(elements(results[0]), 1), not numbers or value.ndim - 1 in numbers


@dataclass(frozen=True, eq=False)
class Costs:
    """Prices of the nodes of one joint graph on one device.

    known_seconds: of operators outside of generated kernels, one run each, where they were timed or learned.
    """

    joint: JointGraph
    device: Device
    settings: Settings
    known_seconds: Mapping[fx.Node, float] = field(default_factory=dict)

    @cached_property
    def launch_seconds(self) -> float:
        """What one more kernel costs."""
        given = self.settings.launch_overhead
        return self.device.launch_seconds if given is None else given * 1e-6

    def move_seconds(self, count_bytes: int) -> float:
        """Reading or writing this many bytes once."""
        return count_bytes / self.device.bytes_per_second

    @cached_property
    def flops(self) -> dict[fx.Node, int]:
        """FLOPs of each operator of the joint graph that has any."""
        counted = {n: flops(n) for n in self.joint.nodes if ops.kind(n) is Kind.CONTRACTION and not ops.is_item(n)}
        return {node: count for node, count in counted.items() if count}

    def run_seconds(self, node: fx.Node) -> float:
        """Running this node once more in the backward; 0 for what is free, such as a view."""
        kind = ops.kind(node)
        if ops.is_item(node) or kind in (Kind.INPUT, Kind.CONSTANT, Kind.VIEW, Kind.SYMBOLIC):
            return 0.0
        if node in self.known_seconds:
            return self.known_seconds[node]
        if kind in (Kind.CONTRACTION, Kind.EXTERN):
            return self._extern_seconds(node)
        moved = self._moved_bytes(node, kind)
        work = max(self.move_seconds(moved), self._arithmetic_seconds(node, kind))
        return work + (self.launch_seconds if self._adds_kernel(node, kind) else 0.0)

    def alone_seconds(self, node: fx.Node) -> float:
        """Running an operator by itself, as op by op: FLOPs, bytes moved and a launch, each at its rate, added up.

        A sum and not the largest: it is linear in what can be counted of a run, so that a plan's predicted cost is
        that of the FLOPs and bytes measured.
        """
        arithmetic = ALONE_FLOP_WEIGHT * self._flop_seconds(node)
        return arithmetic + self.move_seconds(moved_bytes(node)) + self.launch_seconds

    def extern_seconds(self, node: fx.Node) -> float:
        """One run of an operator outside of generated kernels: as timed or learned, else by the roofline."""
        return self.known_seconds[node] if node in self.known_seconds else self._extern_seconds(node)

    def _extern_seconds(self, node: fx.Node) -> float:
        moved = self.move_seconds(moved_bytes(node))
        return max(moved, self._flop_seconds(node)) + (self.device.extern_seconds or self.launch_seconds)

    def _flop_seconds(self, node: fx.Node) -> float:
        count = self.flops.get(node, 0)
        if not count:
            return 0.0
        values = [t for a in node.all_input_nodes for t in tensors_of(a.meta.get("val"))]
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        family = next((family for family in ("attention", "convolution") if family in name), "matmul")
        return count / self.device.flops_per_second(values[0].dtype.itemsize if values else 4, family)

    def pointwise_seconds(self, node: fx.Node) -> float:
        """The arithmetic of a node inside of a generated kernel, which its traffic may hide."""
        kind = ops.kind(node)
        return self._arithmetic_seconds(node, kind) if kind in (Kind.POINTWISE, Kind.REDUCTION) else 0.0

    def _moved_bytes(self, node: fx.Node, kind: Kind) -> int:
        result = tensor_bytes(node.meta.get("val"))
        if kind is Kind.REDUCTION:
            return result + max((tensor_bytes(a.meta.get("val")) for a in node.all_input_nodes), default=0)
        return 2 * result if self.materialized_in_backward(node) else 0

    def _arithmetic_seconds(self, node: fx.Node, kind: Kind) -> float:
        count = sum(elements(tensor) for tensor in tensors_of(node.meta.get("val")))
        if kind is Kind.REDUCTION:
            read = [elements(t) for a in node.all_input_nodes for t in tensors_of(a.meta.get("val"))]
            count = max([count, *read])
        return count / self._results_per_second(node)

    def _results_per_second(self, node: fx.Node) -> float:
        packet = getattr(node.target, "overloadpacket", None)
        return self.device.results_per_second(getattr(packet, "__name__", ""), ops.is_transcendental(node))

    def _adds_kernel(self, node: fx.Node, kind: Kind) -> bool:
        if kind in (Kind.CONTRACTION, Kind.EXTERN, Kind.REDUCTION):
            return True
        return self.materialized_in_backward(node)

    def materialized_in_backward(self, node: fx.Node) -> bool:
        """Whether a recomputed value must be written out, since no one kernel holds all that the backward does with it.

        An operator that cannot fuse with it reads it; or it joins values, and reductions over different axes read it,
        each of which would have to read what it joins: the input of a layer norm is read by the gradients of the input
        (over a row) and of the weight (over a column).
        """
        readers = self.readers(node)
        if any(user in self.joint.tangent_closure and not ops.is_fusible(node, user) for user in readers):
            return True
        size = tensor_bytes(node.meta.get("val"))
        joined = [a for a in node.all_input_nodes if tensor_bytes(a.meta.get("val")) >= size]
        return len(joined) > 1 and len(self._axes_reduced[node]) > 1

    @cached_property
    def _axes_reduced(self) -> dict[fx.Node, frozenset[tuple[int, bool]]]:
        """For each node the kinds of the backward's reductions that it feeds within their kernels, two at most."""
        found: dict[fx.Node, frozenset[tuple[int, bool]]] = {}
        for node in reversed(self.joint.nodes):
            axes: set[tuple[int, bool]] = set()
            for user in node.users:
                kind = ops.kind(user)
                if kind is Kind.REDUCTION and user in self.joint.tangent_closure:
                    axes.add(_reduced(user))
                elif kind is Kind.POINTWISE or ops.is_view(user):
                    axes |= found.get(user, frozenset())
            # Two tell as much as all, and an unrolled network would gather one for each of its steps.
            found[node] = frozenset(sorted(axes)[:2])
        return found

    def written_in_forward(self, node: fx.Node) -> bool:
        """Whether the forward writes this value to memory even if nobody saves it."""
        base = ops.view_base(node)
        if ops.kind(base) is not Kind.POINTWISE or base in self._forward_outputs:
            return True
        readers = [user for user in self.readers(base) if user in self.joint.required_forward]
        return any(not ops.is_fusible(base, user) for user in readers)

    @cached_property
    def _forward_outputs(self) -> frozenset[fx.Node]:
        return frozenset(ops.view_base(node) for node in self.joint.forward_outputs)

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that read this value's memory, looking through views."""
        found: list[fx.Node] = []
        pending, seen = [node], {node}
        while pending:
            for user in pending.pop().users:
                if user in seen or user.op == "output":
                    continue
                seen.add(user)
                (pending if ops.is_view(user) else found).append(user)
        return found

    # --- the two prices of the cut, in femtoseconds: integers, so that ties are ties -------------------------

    def save_price(self, node: fx.Node) -> int:
        """Price of saving: a write if the forward would not write it anyway, and a read in the backward."""
        count_bytes = saved_bytes(node)
        traffic = self.move_seconds(tensor_bytes(node.meta.get("val")))
        if count_bytes and not self.written_in_forward(node):
            traffic *= 2
        if node.meta.get("recompute") == CheckpointPolicy.PREFER_RECOMPUTE:
            traffic *= PREFERENCE
        kept = self.settings.memory_price * 1e-6 * count_bytes / MIB
        return round((self.settings.memory_weight * traffic + kept) * FEMTOSECONDS)

    def recompute_price(self, node: fx.Node) -> int:
        """Price of running the node again in the backward, weighted as the settings say.

        A value that only the backward uses is computed once either way, so its price is 0.
        """
        if node not in self.joint.required_forward:
            return 0
        return round(self._recompute_weight(node) * self.run_seconds(node) * FEMTOSECONDS)

    def rerun_price(self, node: fx.Node) -> int:
        """Price of one more run under Inductor, whoever runs it first."""
        return round(self._recompute_weight(node) * self.run_seconds(node) * FEMTOSECONDS)

    def run_price(self, node: fx.Node) -> int:
        """Price of one more run of an operator by itself, weighted as the settings say."""
        return round(self._recompute_weight(node) * self.alone_seconds(node) * FEMTOSECONDS)

    def _recompute_weight(self, node: fx.Node) -> float:
        weight = self.settings.recompute_weight
        if ops.kind(node) is Kind.CONTRACTION:
            weight *= self.settings.contraction_weight
        if node.meta.get("recompute") == CheckpointPolicy.PREFER_SAVE:
            weight *= PREFERENCE
        return weight
