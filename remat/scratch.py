"""Bytes that a kernel takes for itself while it runs, learned by running it once.

Op by op, oneDNN's convolutions copy arguments and results into layouts of their own (on a 3x3 convolution of 4 MiB
images: 4.1 MiB forward, 8 MiB backward), attention kernels take room for blocks, torch's prims run as several operators
(14 MiB where the result of a max pool has 1), a Python number becomes a tensor (12 bytes). No formula of ours would
hold from one release or machine to the next, so each distinct call is run on zeros of the same shapes and strides,
under torch's profiler, which reports allocations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from remat import channels_last, ops, torch_internals
from remat.costs import NOMINAL_SIZE, tensors_of
from remat.joint import JointGraph
from remat.ops import Kind

logger = logging.getLogger("remat")
aten = torch.ops.aten

# Matrix products write into their result alone (test_memory compares every step with the allocator's count).
_WITHOUT_SCRATCH: Final = frozenset(
    {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv, aten.mv, aten.dot}
)
_known: dict[str, int] = {}


@dataclass(frozen=True)
class Call:
    """An operator with what it was called with: tensors (fake or meta), numbers, or FX nodes that stand for them."""

    operator: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


def learn_scratch(joint: JointGraph) -> dict[fx.Node, int]:
    """The bytes that each operator's kernel takes beside its results, above zero; nodes not in it take none."""
    if joint.device.type == "meta":
        return {}  # nothing runs there
    nodes = [node for node in joint.nodes if _may_take_scratch(node)]
    counts = scratch_of([Call(node.target, node.args, node.kwargs) for node in nodes])
    return {node: count for node, count in zip(nodes, counts, strict=True) if count}


def learn_scratch_outside(joint: JointGraph) -> dict[fx.Node, int]:
    """The same for operators that Inductor leaves outside of its kernels on a CPU; elsewhere it is not known.

    Where its layout optimization is on, convolutions find their arguments in channels last.
    """
    if joint.device.type != "cpu":
        return {}
    outside = (Kind.CONTRACTION, Kind.EXTERN)
    nodes = [node for node in joint.nodes if ops.kind(node) in outside and _may_take_scratch(node)]
    last = channels_last.is_on(joint.nodes, joint.device)
    calls = []
    for node in nodes:
        moves = last and getattr(node.target, "overloadpacket", None) in (aten.convolution, aten.convolution_backward)
        shaped = _in_channels_last if moves else _value
        calls.append(Call(node.target, *torch.utils._pytree.tree_map(shaped, (node.args, node.kwargs))))
    return {node: count for node, count in zip(nodes, scratch_of(calls), strict=True) if count}


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _in_channels_last(argument: Any) -> Any:
    value = _value(argument)
    if not isinstance(value, torch.Tensor) or value.ndim not in (4, 5):
        return value
    strides = channels_last.strides(_sizes(value.shape))
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")


def scratch_of(calls: Sequence[Call]) -> list[int]:
    """The bytes that each call takes beside its results; what is not known yet is run once, on zeros."""
    signatures = [_signature(call) for call in calls]
    new = {signature: call for signature, call in zip(signatures, calls, strict=True) if signature not in _known}
    if new:
        with torch_internals.real_tensors(), torch.random.fork_rng(enabled=True), torch.no_grad():
            _measure(new)
    return [_known.get(signature, 0) for signature in signatures]


def is_without_scratch(operator: Any) -> bool:
    """Whether an operator is known to write into its result alone."""
    return getattr(operator, "overloadpacket", operator) in _WITHOUT_SCRATCH


def _may_take_scratch(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch_internals.has_unbacked_bindings(node):
        return False
    if any(map(_is_symbolic, (node, *node.all_input_nodes))):
        return False  # at the nominal size the arguments could be larger than the machine
    if target.namespace == "prims":
        return not ops.is_item(node)
    if ops.kind(node) is Kind.POINTWISE:
        # A mask times a float: the CPU kernel converts the mask first.
        return _mixes_dtypes(node) or any(isinstance(argument, int | float) for argument in node.args)
    if ops.kind(node) not in (Kind.CONTRACTION, Kind.EXTERN) or ops.is_mutating(node):
        return False
    return target.namespace == "aten" and not is_without_scratch(target)


def _is_symbolic(node: fx.Node) -> bool:
    sizes = [size for tensor in tensors_of(node.meta.get("val")) for size in tensor.shape]
    return torch_internals.is_sym_node(node) or not all(isinstance(size, int) for size in sizes)


def _mixes_dtypes(node: fx.Node) -> bool:
    values = [argument.meta.get("val") for argument in node.all_input_nodes]
    return len({value.dtype for value in values if isinstance(value, torch.Tensor)}) > 1


def _signature(call: Call) -> str:
    arguments = torch.utils._pytree.tree_map(_shaped, (call.arguments, dict(call.keywords)))
    threads = torch.get_num_threads()
    return f"{call.operator} {arguments!r} {threads}"


def _shaped(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _Shape(value.meta.get("val"))
    return _Shape(value) if isinstance(value, torch.Tensor) else value


def _made(value: Any) -> Any:
    shaped = _shaped(value)
    return shaped.make() if isinstance(shaped, _Shape) else shaped


class _Shape:
    """How an argument lies in memory, as text; makes one like it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        if isinstance(self.value, torch.Tensor):
            return f"{self.value.dtype} {self._device} {_sizes(self.value.shape)} {_sizes(self.value.stride())}"
        return repr(_sizes([self.value])[0])

    @property
    def _device(self) -> torch.device:
        """Where it is; a meta tensor stands for one on the CPU."""
        device: torch.device = self.value.device
        return torch.device("cpu") if device.type == "meta" else device

    def make(self) -> Any:
        if not isinstance(self.value, torch.Tensor):
            return _sizes([self.value])[0]
        shape, strides = _sizes(self.value.shape), _sizes(self.value.stride())
        return torch.empty_strided(shape, strides, dtype=self.value.dtype, device=self._device).zero_()


def _sizes(values: Any) -> list[Any]:
    symbolic = (int, torch.SymInt)
    return [torch_internals.nominal_size(v, NOMINAL_SIZE) if isinstance(v, symbolic) else v for v in values]


def _measure(calls: Mapping[str, Call]) -> None:
    """Run one call of each kind and note its scratch."""
    spans: dict[str, tuple[int, int, int]] = {}
    with torch_internals.quiet_profiler() as profiler:
        for signature, call in calls.items():
            arguments, keywords = torch.utils._pytree.tree_map(_made, (call.arguments, dict(call.keywords)))
            started = time.time_ns()
            try:
                result = call.operator(*arguments, **keywords)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                # Zeros are no legal arguments of every operator.
                logger.warning("the scratch of %s is not known and counts as 0: %s", call.operator, error)
                continue
            writes = isinstance(call.operator, torch._ops.OpOverload) and call.operator._schema.is_mutable
            spans[signature] = (started, time.time_ns(), 0 if writes else _owned(result))
            del result, arguments, keywords
    events = torch_internals.memory_events(profiler)
    for signature, (started, ended, owned) in spans.items():
        alive = highest = 0
        for moment, count in events:
            if started <= moment <= ended:
                alive += count
                highest = max(highest, alive)
        _known[signature] = max(0, highest - owned)


def _owned(result: Any) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_of(result)}
    return sum(storages.values())
