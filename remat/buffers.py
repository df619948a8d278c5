"""Which buffers Inductor would write for one half of a plan, predicted from the joint graph.

Inductor lowers operator by operator: a pointwise result is inlined into whatever reads it, unless something asks for it
in memory (an operator outside, a reduction, an output, too many reads). That is followed here as torch 2.11 to 2.14 do
it (`GraphLowering.run_node`, `StorageBox.should_realize_on_reuse`), on loads that are kept as strided views, so that
`fusion` can decide as Inductor's scheduler does: by the loops that remain when neighbouring axes are merged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx

from remat import ops, torch_internals
from remat.costs import NOMINAL_SIZE, tensors_of
from remat.ops import Kind
from remat.passes.apart import OUTSIDE, is_moved

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class Limits:
    """Inductor's thresholds (torch._inductor.config) and rules, which differ between C++ and Triton.

    reads: a value with several users is written when it loads more than this. accumulated_reads: any value.
    operations: any value of more operations. heavy: operators whose result is written when it has several users.
    outer_loops: a reduction over rows and what follows share their loop over rows. copies_into_cat: each part of a
    concatenation is copied by a kernel of its own.
    """

    reads: int
    accumulated_reads: int
    operations: int
    heavy: frozenset[str]
    outer_loops: bool
    copies_into_cat: bool


_HEAVY: Final = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
CPU_LIMITS: Final = Limits(4, 12, 50, _HEAVY, True, True)
GPU_LIMITS: Final = Limits(4, 8, 30, frozenset(), False, False)
# Whatever the device and the users, a value of more operations than this is written.
MOST_OPERATIONS: Final = 100
# Operators that ask for their arguments in memory, as torch._inductor.lowering lists them.
_NEED_MEMORY: Final = frozenset(
    {
        aten.as_strided, aten.avg_pool2d, aten.avg_pool2d_backward, aten.bmm, aten.convolution,
        aten.convolution_backward, aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten.mm,
        aten.upsample_nearest2d, aten._int_mm,
    }
)  # fmt: skip
# Operators outside that want their arguments in an order of strides: each makes its own copy of what is not in memory
# yet (`sdpa_constraint`, `constrain_conv_bwd_to_fx_strides`), and four calls four copies of a mask.
_CONSTRAINED: Final = ("attention", "convolution_backward")
# Products of matrices, each factor of which lies in memory element by element.
_PRODUCTS: Final = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
# Pointwise operators that do not read element by element: what they read is not known to line up with the result.
_GATHERING: Final = frozenset(
    {
        aten.embedding, aten.index, aten._unsafe_index, aten.gather, aten._unsafe_masked_index, aten.flip, aten.roll,
        aten.repeat, aten.constant_pad_nd, aten.slice_scatter, aten.select_scatter, aten.upsample_nearest2d,
        aten.diagonal_scatter, aten.index_select,
    }
)  # fmt: skip
# Of those the ones that read a tensor at a shifted place.
_SHIFTING: Final = frozenset({aten.slice_scatter, aten.constant_pad_nd})
# Reductions over windows: lowered element by element.
_WINDOWS: Final = frozenset({aten.avg_pool2d, aten.max_pool2d_with_indices, prims._low_memory_max_pool_with_offsets})
# Operators that fill a buffer and then add or write into it.
_SCATTERING: Final = frozenset(
    {
        aten.index_put, aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate, aten.scatter_add,
        aten.scatter, aten.scatter_reduce, aten.embedding_dense_backward, aten.index_add,
    }
)  # fmt: skip
# On a CPU the variance of a row this long or shorter takes two passes (config.cpp.use_two_step_variance_threshold).
TWO_STEP_VARIANCE: Final = 1024

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides
# What views made of layouts, and how far they moved the beginning: plans of one graph ask the same again and again.
Views = dict[tuple[Any, Layout], tuple[Layout, int]]


@dataclass(frozen=True)
class Load:
    """A buffer read over the reader's axes, and how many of its elements at most.

    offset: of the first element read. indirect: where it is read depends on data; a kernel of several buffers then
        counts as reading all of it.
    """

    buffer: int
    layout: Layout
    count: int
    indirect: bool = False
    offset: int = 0

    @property
    def place(self) -> tuple[int, Layout, int]:
        """What two loads must have in common to be one."""
        return self.buffer, self.layout, self.offset


@dataclass(eq=False)
class Buffer:
    """Memory that exists: an input, a result of an operator outside, or of generated code.

    loops: sizes of the axes that generated code iterates over, merged where neighbours can be, without and with those
        reduced; None for what is not generated.
    step: the place in the order where it came to be. steps: the places whose results it computes. after: buffers that
    must be there before it, loads aside. written_bytes: what writing it moves. kept: whether it is an output.
    inside: the buffer whose memory it is written to, where it has none of its own. node: of an input, the value.
    """

    index: int
    size_bytes: int
    itemsize: int
    step: int
    shape: tuple[int, ...] = ()
    steps: frozenset[int] = frozenset()
    loads: tuple[Load, ...] = ()
    loops: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    after: frozenset[int] = frozenset()
    written_bytes: int = 0
    kept: bool = False
    extern: bool = False
    inside: int | None = None
    node: fx.Node | None = None


class Cell:
    """A value that is not in memory yet, or the buffer that it became."""

    def __init__(self, shape: Sequence[int], itemsize: int, steps: Iterable[int] = ()) -> None:
        self.shape = tuple(shape)
        self.itemsize = itemsize
        self.loads: tuple[Load, ...] = ()
        self.operations = 0
        self.steps = frozenset(steps)
        self.heavy = False
        self.buffer: Buffer | None = None


@dataclass(frozen=True)
class Value:
    """A cell seen through views: the nodes that make them."""

    cell: Cell
    views: tuple[fx.Node | _Piece, ...] = ()


def contiguous(shape: Sequence[int]) -> Layout:
    """Row-major."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(shape), tuple(reversed(strides))


def merged(layouts: Collection[Layout], sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the axes that remain when neighbours are merged wherever every layout allows it."""
    kept: list[int] = []
    previous = -1
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        if previous >= 0 and all(strides[previous] == strides[axis] * size for _, strides in layouts):
            kept[-1] *= size
        else:
            kept.append(size)
        previous = axis
    return tuple(kept)


def normal(layout: Layout) -> Layout:
    """The same addresses in the fewest axes; axes at the end that do not move are dropped."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(*layout, strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == stride * size:
            sizes[-1] *= size
            strides[-1] = stride
        else:
            sizes.append(size)
            strides.append(stride)
    while strides and strides[-1] == 0:
        sizes.pop()
        strides.pop()
    return tuple(sizes), tuple(strides)


def broadcast(layout: Layout, shape: Sequence[int]) -> Layout:
    """A layout over the axes of a larger result: added and widened axes do not move."""
    sizes, strides = layout
    if tuple(sizes) == tuple(shape):
        return layout
    missing = len(shape) - len(sizes)
    if missing < 0:
        return contiguous(shape)
    padded = (0,) * missing + tuple(
        stride if size == wanted else 0 for size, stride, wanted in zip(sizes, strides, shape[missing:], strict=True)
    )
    return tuple(shape), padded


def _through(view: Any, layout: Layout) -> tuple[Layout, int]:
    """What a view makes of a layout, and how far it moves the beginning; a copy where no strides can say it."""
    arguments, keywords = torch.utils._pytree.tree_map(_plain, (view.args, view.kwargs))
    tensor = torch.empty_strided(*layout, device="meta")
    try:
        result = view.target(tensor, *arguments[1:], **keywords)
    except (RuntimeError, ValueError):
        # A view of a layout that Inductor computes on the fly and that memory could not have; torch's own code raises
        # the one, its Python references, which run while something is traced, the other.
        result = None
    if isinstance(result, torch.Tensor):
        return (tuple(result.shape), tuple(result.stride())), int(result.storage_offset())
    return contiguous(_sizes(view.meta["val"].shape)), 0


def _plain(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.SymInt):
        return torch_internals.nominal_size(value, NOMINAL_SIZE)
    return value


def _sizes(sizes: Iterable[Any]) -> tuple[int, ...]:
    return tuple(torch_internals.nominal_size(size, NOMINAL_SIZE) for size in sizes)


class Half:
    """Forward or backward, lowered: its buffers in the order in which they come to be.

    order: the nodes that run; a node may run more than once, and what it reads and does not run is there from the
    start. outputs: what is returned. views: what is known of the graph's views. cloned: inputs that Inductor copies
    before anything else (`channels_last`). keeps_products: products stay where they are (`passes.apart`).
    """

    def __init__(
        self,
        order: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        limits: Limits,
        views: Views | None = None,
        cloned: Iterable[fx.Node] = (),
        keeps_products: bool = False,
    ) -> None:
        self.order = order
        self.keeps_products = keeps_products
        self.limits = limits
        self._viewed: Views = {} if views is None else views
        self.buffers: list[Buffer] = []
        self._values: dict[fx.Node, Any] = {}
        self._outputs = set(outputs)
        self._users, last = self._find_users()
        self._products = self._find_products()
        absorbed = set(self._products.values())
        for node in cloned:
            self._clone(node)
        for step, node in enumerate(order):
            if step not in absorbed:
                self._values[node] = self._lower(step, node, last[node] == step)
        self.results: dict[fx.Node, tuple[int, ...]] = {}  # the buffers of each output
        for node in outputs:
            buffers = [self._realize(value.cell) for value in _leaves(self._values.get(node))]
            for buffer in buffers:
                buffer.kept = True
            self.results[node] = tuple(buffer.index for buffer in buffers)

    def _find_users(self) -> tuple[list[list[int]], dict[fx.Node, int]]:
        """For each step the steps that read its result, and for each node its last run."""
        users: list[list[int]] = [[] for _ in self.order]
        newest: dict[fx.Node, int] = {}
        for step, node in enumerate(self.order):
            for argument in node.all_input_nodes:
                if argument in newest:
                    users[newest[argument]].append(step)
            newest[node] = step
        return users, newest

    def _find_products(self) -> dict[int, int]:
        """Additions of a product that nobody else reads, with the step of the product: Inductor makes them one `addmm`.

        It runs where the addition was, so what is multiplied lives until then (`post_grad.is_valid_addmm_fusion`).
        """
        found: dict[int, int] = {}
        newest: dict[fx.Node, int] = {}
        outside = [step for step, node in enumerate(self.order) if ops.kind(node) in OUTSIDE]
        for step, node in enumerate(self.order):
            if node.target is aten.add.Tensor and not node.kwargs:
                both = node.all_input_nodes
                # The second summand is tried first (the order of Inductor's patterns).
                for one, other in (both[::-1], both) if len(both) == 2 else ():
                    if not self._is_product(newest.get(one)) or not self._fits_product(step, one, other):
                        continue
                    if not (self.keeps_products and is_moved(newest[one], step, outside)):
                        found.setdefault(step, newest[one])
            newest[node] = step
        return found

    def _is_product(self, step: int | None) -> bool:
        if step is None or self.order[step].target is not aten.mm.default:
            return False
        return len(self._users[step]) == 1 and self.order[step] not in self._outputs

    def _fits_product(self, step: int, product: fx.Node, other: fx.Node) -> bool:
        """Whether the other is as large or is broadcast; on a GPU pointwise readers take the addition instead."""
        value = other.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return False
        sizes, whole = _sizes(value.shape), _sizes(product.meta["val"].shape)
        if len(sizes) > len(whole) or any(a not in (1, b) for a, b in zip(sizes[::-1], whole[::-1], strict=False)):
            return False
        if self.limits.outer_loops or self.order[step] in self._outputs:
            return True
        return not all(ops.kind(self.order[user]) is Kind.POINTWISE for user in self._users[step])

    # --- values -------------------------------------------------------------------------------------------

    def _value(self, node: fx.Node) -> Any:
        """The newest value of a node: what is there from the start is a buffer, but constants are made by readers."""
        if node not in self._values:
            tensors = tensors_of(node.meta.get("val"))
            if tensors and ops.kind(node) is Kind.FACTORY:
                self._values[node] = Value(Cell(_sizes(tensors[0].shape), tensors[0].dtype.itemsize))
            else:
                self._values[node] = self._input(node, tensors[0]) if tensors else None
        return self._values[node]

    def _input(self, node: fx.Node, tensor: torch.Tensor) -> Value:
        cell = Cell(_sizes(tensor.shape), tensor.dtype.itemsize)
        cell.buffer = self._new(cell.shape, cell.itemsize, -1)
        cell.buffer.node = node
        cell.loads = (Load(cell.buffer.index, (cell.shape, _sizes(tensor.stride())), math.prod(cell.shape)),)
        return Value(cell)

    def _new(self, shape: Sequence[int], itemsize: int, step: int) -> Buffer:
        size = math.prod(shape) * itemsize
        buffer = Buffer(len(self.buffers), size, itemsize, step, tuple(shape), written_bytes=size)
        self.buffers.append(buffer)
        return buffer

    def _loads(self, value: Value) -> list[Load]:
        found = []
        for load in value.cell.loads:
            layout, count, offset = load.layout, load.count, load.offset
            for view in value.views:
                key = (view, layout)
                if key not in self._viewed:
                    self._viewed[key] = _through(view, layout)
                layout, moved = self._viewed[key]
                offset += moved
                count = min(count, math.prod(layout[0]))
            found.append(Load(load.buffer, layout, count, load.indirect, offset))
        return found

    def _realize(self, cell: Cell) -> Buffer:
        """Write a value that was inlined so far."""
        if cell.buffer is None:
            buffer = self._new(cell.shape, cell.itemsize, max(cell.steps, default=-1))
            buffer.steps, buffer.loads = cell.steps, cell.loads
            layouts = [load.layout for load in cell.loads]
            buffer.loops = (merged([*layouts, contiguous(cell.shape)], cell.shape), ())
            self._becomes(cell, buffer)
        return cell.buffer  # type: ignore[return-value]

    def _copied(self, value: Value) -> Value:
        """The same in memory, where only this reader finds it."""
        if value.cell.buffer is not None:
            return value
        cell = copy.copy(value.cell)
        self._realize(cell)
        return Value(cell, value.views)

    def _written_out(self, value: Value, step: int) -> Value:
        """A factor of a product that repeats its elements, written out: each product makes its own copy."""
        loads = self._loads(value)
        if len(loads) != 1 or all(stride or size < 2 for size, stride in zip(*loads[0].layout, strict=True)):
            return value
        cell = Cell(loads[0].layout[0], value.cell.itemsize)
        buffer = self._new(cell.shape, cell.itemsize, step)
        buffer.steps, buffer.loads = value.cell.steps, tuple(loads)
        buffer.loops = (merged([loads[0].layout, contiguous(cell.shape)], cell.shape), ())
        self._becomes(cell, buffer)
        return Value(cell)

    def _clone(self, node: fx.Node) -> None:
        """Copy an input: whatever reads it, and whoever it is returned to, gets the copy."""
        source = self._value(node).cell
        cell = Cell(source.shape, source.itemsize)
        cell.loads = source.loads
        self._realize(cell)
        self._values[node] = Value(cell)

    def _becomes(self, cell: Cell, buffer: Buffer) -> None:
        cell.buffer = buffer
        cell.loads = (Load(buffer.index, contiguous(cell.shape), math.prod(cell.shape)),)
        cell.steps, cell.operations, cell.heavy = frozenset(), 0, False

    # --- operators ------------------------------------------------------------------------------------------

    def _lower(self, step: int, node: fx.Node, is_last_run: bool) -> Any:
        kind = ops.kind(node)
        if ops.is_item(node) and not ops.is_view(node):
            parent = self._value(node.args[0])  # type: ignore[arg-type]
            place = node.args[1]
            found = parent[place] if isinstance(parent, list) and isinstance(place, int) else None
            if found is not None:
                self._consider(found, step, node, is_last_run)
            return found
        if kind in (Kind.SYMBOLIC, Kind.INPUT, Kind.CONSTANT) or node.op != "call_function":
            return None
        packet = getattr(node.target, "overloadpacket", node.target)
        if kind is Kind.VIEW:
            value = self._view(node)
        elif step in self._products:
            product = self._products[step]
            values = self._arguments(self.order[product])
            other = next(a for a in node.all_input_nodes if a is not self.order[product])
            value = self._extern(product, self.order[product], [*_leaves(self._value(other)), *values], step)
        elif ops.is_mutating(node) and packet is aten.copy_:
            value = self._write(step, node)
        elif packet in _SCATTERING:
            value = self._scatter(step, node)
        elif packet is aten.cat and self.limits.copies_into_cat:
            value = self._cat(step, node)
        elif packet is aten.var_mean:
            return self._variance(step, node)
        elif kind in (Kind.POINTWISE, Kind.FACTORY) or packet in _WINDOWS:
            value = self._pointwise(step, node, packet)
        elif kind is Kind.REDUCTION:
            value = self._reduction(step, node)
        else:
            value = self._extern(step, node)
        if isinstance(value, Value):
            self._consider(value, step, node, is_last_run)
        return value

    def _consider(self, value: Value, step: int, node: fx.Node, is_last_run: bool) -> None:
        """Write the value now if Inductor would: several users, many reads, many operations."""
        cell = value.cell
        if cell.buffer is not None:
            return
        returned = is_last_run and node in self._outputs
        users = self._users[step]
        limits = self.limits
        many = cell.operations > limits.operations
        if len(set(users)) + returned > 1:
            packets = {getattr(self.order[user].target, "overloadpacket", None) for user in users}
            outside = any(ops.kind(self.order[user]) in (Kind.EXTERN, Kind.CONTRACTION) for user in users)
            wanted = len(cell.loads) > 1 and (outside or bool(packets & _NEED_MEMORY))
            wanted |= returned and bool(cell.loads) and not value.views
            if wanted or cell.heavy or many or len(cell.loads) > limits.reads:
                self._realize(cell)
        if cell.buffer is None and len(cell.loads) > 1 and (many or len(cell.loads) > limits.accumulated_reads):
            self._realize(cell)
        if cell.buffer is None and cell.operations > MOST_OPERATIONS:
            self._realize(cell)

    def _arguments(self, node: fx.Node) -> list[Value]:
        return [leaf for argument in node.all_input_nodes for leaf in _leaves(self._value(argument))]

    def _view(self, node: fx.Node) -> Any:
        base = next(a for a in node.all_input_nodes if not torch_internals.is_sym_node(a))
        value = self._value(base)
        if isinstance(value, list):
            return value[node.args[1]] if ops.is_item(node) else value  # type: ignore[index]
        if not isinstance(value, Value):
            return None
        if isinstance(node.meta.get("val"), list | tuple):
            # A split: its items are the views.
            return [Value(value.cell, (*value.views, _Piece(node, place))) for place in range(len(node.meta["val"]))]
        return Value(value.cell, (*value.views, node))

    def _inlined(
        self, step: int, tensor: torch.Tensor, values: Sequence[Value], gathers: bool, shifts: bool = False
    ) -> Cell:
        """A cell that computes a tensor from values, element by element, or from wherever its elements lie."""
        cell = Cell(_sizes(tensor.shape), tensor.dtype.itemsize, (step,))
        total = math.prod(cell.shape)
        loads: dict[tuple[int, Layout, int], Load] = {}
        for place, value in enumerate(values):
            for load in self._loads(value):
                moved = shifts and len(load.layout[0]) == len(cell.shape)
                indirect = gathers and not moved and place == 0 and load.layout[0] != cell.shape
                if moved:
                    layout = (cell.shape, load.layout[1])
                elif indirect:
                    layout = contiguous(cell.shape)
                elif gathers and load.layout[0] == cell.shape[: len(load.layout[0])]:
                    # The indices of rows: the same along each row.
                    layout = (cell.shape, load.layout[1] + (0,) * (len(cell.shape) - len(load.layout[0])))
                else:
                    layout = broadcast(load.layout, cell.shape)
                count, indirect = min(load.count, total), indirect or load.indirect
                found = Load(load.buffer, layout, count, indirect, load.offset)
                loads[found.place] = found
            cell.steps |= value.cell.steps
            cell.heavy |= value.cell.heavy
            cell.operations += value.cell.operations
        cell.operations += 1
        cell.loads = tuple(loads.values())
        return cell

    def _pointwise(self, step: int, node: fx.Node, packet: Any) -> Any:
        values = self._arguments(node)
        results = []
        for tensor in tensors_of(node.meta.get("val")):
            gathers = packet in _GATHERING | _WINDOWS or packet is aten.cat
            cell = self._inlined(step, tensor, values, gathers, packet in _SHIFTING)
            cell.heavy |= getattr(packet, "__name__", "") in self.limits.heavy
            results.append(Value(cell))
        return results if isinstance(node.meta.get("val"), list | tuple) else (results[0] if results else None)

    def _cat(self, step: int, node: fx.Node) -> Value:
        """Every part is copied, or computed, into its place."""
        tensor = node.meta["val"]
        whole = Cell(_sizes(tensor.shape), tensor.dtype.itemsize)
        parts = []
        listed = node.args[0] if isinstance(node.args[0], list | tuple) else ()
        for argument in listed:
            if isinstance(argument, fx.Node):
                cell = self._inlined(step, argument.meta["val"], _leaves(self._value(argument)), False)
                part = self._realize(cell)
                part.kept = True
                parts.append(part.index)
        buffer = self._new(whole.shape, whole.itemsize, step)  # after its parts: what is needed has the lower number
        buffer.written_bytes = 0
        buffer.after = frozenset(parts)
        for number in parts:
            self.buffers[number].inside = buffer.index
        self._becomes(whole, buffer)
        return Value(whole)

    def _scatter(self, step: int, node: fx.Node) -> Value:
        tensor = node.meta["val"]
        values = self._arguments(node)
        filled = Cell(_sizes(tensor.shape), tensor.dtype.itemsize, (step,))
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        base = self._value(node.args[0]) if packet is not aten.embedding_dense_backward else None  # type: ignore[arg-type]
        if isinstance(base, Value):
            filled = self._inlined(step, tensor, [base], False)
        target = self._realize(filled)
        given = values if base is None else values[1:]
        widest = max(given, key=lambda value: math.prod(self._shape(value)), default=Value(filled))
        shape = self._shape(widest)
        adding = Cell(shape, target.itemsize, (step,))
        loads = {}
        for value in given:
            for load in self._loads(value):
                layout = broadcast(load.layout, shape)
                found = replace(load, layout=layout)
                loads[found.place] = found
        adding.loads = (*loads.values(), Load(target.index, contiguous(shape), math.prod(shape), True))
        adding.steps |= frozenset(step for value in given for step in value.cell.steps)
        written = self._realize(adding)
        written.after = frozenset((target.index,))
        written.kept = True
        written.inside = target.index
        whole = Cell(filled.shape, filled.itemsize)
        buffer = self._new(whole.shape, whole.itemsize, step)
        buffer.written_bytes = 0
        buffer.after = frozenset((written.index,))
        buffer.inside = target.index
        target.kept = True
        self._becomes(whole, buffer)
        return Value(whole)

    def _shape(self, value: Value) -> tuple[int, ...]:
        return _sizes(value.views[-1].meta["val"].shape) if value.views else value.cell.shape

    def _write(self, step: int, node: fx.Node) -> Any:
        value = self._value(node.args[1])  # type: ignore[arg-type]
        if isinstance(value, Value):
            self._realize(value.cell).kept = True
        return value

    def _reduced(self, step: int, node: fx.Node, values: Sequence[Value], tensor: torch.Tensor) -> Cell:
        """One reduction: a buffer that iterates over what it reads."""
        shape = _sizes(tensors_of(node.all_input_nodes[0].meta.get("val"))[0].shape)
        axes = _axes(node, len(shape))
        loads: dict[tuple[int, Layout, int], Load] = {}
        for value in values:
            for load in self._loads(value):
                layout = broadcast(load.layout, shape)
                found = replace(load, layout=layout)
                loads[found.place] = found
        cell = Cell(_sizes(tensor.shape), tensor.dtype.itemsize)
        buffer = self._new(cell.shape, cell.itemsize, step)
        buffer.steps = frozenset((step,)).union(*(value.cell.steps for value in values))
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        order = (*kept, *axes)
        moved = [
            replace(load, layout=(tuple(shape[a] for a in order), tuple(load.layout[1][a] for a in order)))
            for load in loads.values()
        ]
        buffer.loads = tuple(moved)
        outside = [(tuple(shape[a] for a in kept), tuple(load.layout[1][a] for a in kept)) for load in loads.values()]
        inside = [(tuple(shape[a] for a in axes), tuple(load.layout[1][a] for a in axes)) for load in loads.values()]
        sizes = tuple(shape[a] for a in kept)
        buffer.loops = (merged([*outside, contiguous(sizes)], sizes), merged(inside, tuple(shape[a] for a in axes)))
        self._becomes(cell, buffer)
        return cell

    def _reduction(self, step: int, node: fx.Node) -> Any:
        values = self._arguments(node)
        if not values or not tensors_of(node.all_input_nodes[0].meta.get("val")):
            return self._extern(step, node)
        packet = getattr(node.target, "overloadpacket", None)
        results = []
        for tensor in tensors_of(node.meta.get("val")):
            cell = self._reduced(step, node, values, tensor)
            if packet is aten.mean:
                cell = self._inlined(step, tensor, [Value(cell)], False)
            results.append(Value(cell))
        return results if isinstance(node.meta.get("val"), list | tuple) else results[0]

    def _variance(self, step: int, node: fx.Node) -> Any:
        """Variance and mean: two passes over short rows on a CPU, one elsewhere."""
        values = self._arguments(node)
        tensors = tensors_of(node.meta.get("val"))
        read = math.prod(self._shape(values[0]))
        two_steps = self.limits.outer_loops and read // max(math.prod(_sizes(tensors[0].shape)), 1) <= TWO_STEP_VARIANCE
        first = self._reduced(step, node, values, tensors[1])
        if not two_steps:
            second = self._reduced(step, node, values, tensors[0])
            return [Value(self._inlined(step, tensors[0], [Value(second)], False)), Value(first)]
        mean = self._inlined(step, tensors[1], [Value(first)], False)
        self._realize(mean)
        squares = self._reduced(step, node, [*values, *self._spread(node, mean)], tensors[0])
        return [Value(self._inlined(step, tensors[0], [Value(squares)], False)), Value(mean)]

    def _spread(self, node: fx.Node, mean: Cell) -> list[Value]:
        """The mean, over the axes of what it is the mean of."""
        shape = _sizes(tensors_of(node.all_input_nodes[0].meta["val"])[0].shape)
        axes = _axes(node, len(shape))
        spread = Cell(shape, mean.itemsize)
        _, strides = contiguous([size for axis, size in enumerate(shape) if axis not in axes])
        left = iter(strides)
        assert mean.buffer is not None
        layout = (shape, tuple(0 if axis in axes else next(left) for axis in range(len(shape))))
        spread.loads = (Load(mean.buffer.index, layout, math.prod(mean.shape)),)
        return [Value(spread)]

    def _extern(
        self, step: int, node: fx.Node, values: Sequence[Value] | None = None, at: int | None = None
    ) -> Any:
        """An operator outside: its arguments are in memory, and so are its results; `at`: it runs at another step."""
        values = self._arguments(node) if values is None else values
        if any(word in str(node.target) for word in _CONSTRAINED):
            values = [self._copied(value) for value in values]
        elif getattr(node.target, "overloadpacket", None) in _PRODUCTS:
            values = [self._written_out(value, step) for value in values]
        read = tuple(dict.fromkeys(self._realize(value.cell).index for value in values))
        results: list[Any] = []
        for tensor in tensors_of(node.meta.get("val")):
            cell = Cell(_sizes(tensor.shape), tensor.dtype.itemsize)
            buffer = self._new(cell.shape, cell.itemsize, step if at is None else at)
            buffer.steps, buffer.after, buffer.extern = frozenset((step,)), frozenset(read), True
            self._becomes(cell, buffer)
            cell.loads = (Load(buffer.index, (cell.shape, _sizes(tensor.stride())), math.prod(cell.shape)),)
            results.append(Value(cell))
        if isinstance(node.meta.get("val"), list | tuple):
            found = iter(results)
            return [next(found) if isinstance(item, torch.Tensor) else None for item in node.meta["val"]]
        return results[0] if results else None


class _Piece:
    """One piece of a split, in place of the node of a view."""

    def __init__(self, node: fx.Node, place: int) -> None:
        self.args, self.kwargs = node.args, node.kwargs
        self.meta = {"val": node.meta["val"][place]}
        split: Any = node.target
        self.target = lambda *arguments, **keywords: split(*arguments, **keywords)[place]
        self._key = (node, place)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Piece) and self._key == other._key


def _leaves(value: Any) -> list[Value]:
    if isinstance(value, Value):
        return [value]
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else []


def _axes(node: fx.Node, ndim: int) -> tuple[int, ...]:
    """The axes that a reduction reduces, in order."""
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if given is None or isinstance(given, bool) or (isinstance(given, list | tuple) and not given):
        given = range(ndim)
    listed = [given] if isinstance(given, int) else list(given)
    return tuple(sorted({axis % ndim for axis in listed if isinstance(axis, int)})) if ndim else ()
