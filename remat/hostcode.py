"""Runs the host side of generated code on meta tensors: every allocation, reuse and release happens, no kernel does.

Inductor's wrapper is Python that allocates buffers, launches kernels, and drops buffers when their last reader has
run. Executed with kernels that do nothing it takes milliseconds, and the bytes alive at any moment are those of a real
run: freed by the same reference counts, in the same order.
"""

from __future__ import annotations

import ast
import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from remat import torch_internals_lowering as lowering
from remat.costs import call_flops
from remat.errors import UnsupportedGraph
from remat.scratch import Call

META: Final = torch.device("meta")


@dataclass
class Block:
    """One piece of memory: bytes, the events that it was born and freed at (None: alive at the end), its names.

    names: each with the event from which on the code called it that; a buffer that is reused changes its name.
    """

    bytes: int
    born: int
    freed: int | None = None
    names: list[tuple[int, str]] = field(default_factory=list)

    def name_at(self, event: int) -> str:
        """What the code called it by then; its first name if it had none yet."""
        before = [name for since, name in self.names if since <= event]
        return before[-1] if before else self.names[0][1] if self.names else ""


@dataclass(frozen=True)
class Launch:
    """One kernel launched, or an operator outside of the generated kernels (`extern`).

    event: how many allocations and releases came before it had its results. Of an operator outside: read_bytes and
    written_bytes of its arguments and results, its FLOPs, and the bytes of an element.
    """

    event: int
    name: str
    extern: bool = False
    read_bytes: int = 0
    written_bytes: int = 0
    flops: int = 0
    itemsize: int = 1


class HostRun(lowering.TorchDispatchMode):
    """The memory of one device while host code runs; several modules may run one after another.

    device: where the tensors are taken to be. block_bytes: sizes are rounded up to multiples of this.
    """

    def __init__(self, device: torch.device, block_bytes: int = 1) -> None:
        super().__init__()
        self.device, self.block_bytes = device, block_bytes
        self.events: list[int] = []
        self.blocks: list[Block] = []
        self.launches: list[Launch] = []
        self.calls: list[Call | None] = []  # of each launch, the operator that was called
        self._alive: dict[int, tuple[weakref.ref[Any], Block | None]] = {}  # by the id of a storage; None: not counted
        self._prefix, self._stopped = "", False

    # --- what is alive -----------------------------------------------------------------------------------------

    def foreign(self, shape: Iterable[int], stride: Iterable[int], dtype: torch.dtype) -> Tensor:
        """A tensor that was there before and costs nothing."""
        made = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=META)
        self._track(made, counted=False)
        return made

    def allocate(self, shape: Iterable[int], stride: Iterable[int], dtype: torch.dtype) -> Tensor:
        """A new tensor of this device."""
        made = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=META)
        self._track(made)
        return made

    def block(self, tensor: Tensor) -> Block | None:
        """The memory of a tensor; None if it was there before."""
        known = self._alive.get(id(tensor.untyped_storage()))
        return known[1] if known else None

    def _track(self, tensor: Tensor, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        number = id(storage)
        known = self._alive.get(number)
        if known is not None and known[0]() is storage:
            return
        size = -(-storage.nbytes() // self.block_bytes) * self.block_bytes
        block = Block(size, len(self.events)) if counted and size else None

        def free(_: Any) -> None:
            self._alive.pop(number, None)
            if block is not None and not self._stopped:
                block.freed = len(self.events)
                self.events.append(-size)

        self._alive[number] = (weakref.ref(storage, free), block)
        if block is not None:
            self.blocks.append(block)
            self.events.append(size)

    def stop(self) -> None:
        """Record nothing from here on: what is alive stays so."""
        self._stopped = True

    def name(self, name: str, value: Any) -> None:
        """Note that the code calls this value by a name from here on."""
        if isinstance(value, Tensor):
            block = self.block(value)
            if block is not None:
                block.names.append((len(self.events), self._prefix + name))

    # --- what runs ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operator that the wrapper calls: its results are new memory, unless it writes or views what is there."""
        kwargs = kwargs or {}
        returns_old = any(result.alias_info is not None for result in func._schema.returns)
        if kwargs.get("device") == META:
            return func(*args, **kwargs)  # `allocate` and `foreign`
        if func._schema.is_mutable or returns_old:
            result = func(*args, **{name: META if isinstance(v, torch.device) else v for name, v in kwargs.items()})
        else:
            outside = lowering.fake_results(func, args, kwargs, self.device)
            result = torch.utils._pytree.tree_map(self._own, outside)
        if func._schema.is_mutable or not returns_old:
            self.called(Call(func, args, kwargs), result)
        return result

    def _own(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        self._track(made, counted=value.device.type == self.device.type)
        return made

    def launched(self, name: str) -> None:
        """Note that a generated kernel runs now."""
        self.launches.append(Launch(len(self.events), name))
        self.calls.append(None)

    def called(self, call: Call, result: Any) -> None:
        """Note that an operator outside of the generated kernels has run, its result already there."""
        # Like the arguments, but not them: a reference would keep their memory alive.
        alike = torch.utils._pytree.tree_map(_alike, (tuple(call.arguments), dict(call.keywords), result))
        arguments, keywords, results = alike
        packet = getattr(call.operator, "overloadpacket", call.operator)
        read, written = _bytes((arguments, keywords)), _bytes(results)
        if isinstance(call.operator, torch._ops.OpOverload) and call.operator._schema.is_mutable:
            read, written = _mutable_bytes(call.operator, arguments, keywords)
        sizes = [tensor.itemsize for tensor in torch.utils._pytree.tree_leaves(results) if isinstance(tensor, Tensor)]
        self.launches.append(
            Launch(
                len(self.events),
                f"aten.{packet.__name__}",
                extern=True,
                read_bytes=read,
                written_bytes=written,
                flops=call_flops(packet, arguments, keywords, results),
                itemsize=max(sizes, default=1),
            )
        )
        self.calls.append(Call(call.operator, arguments, keywords))

    # --- modules -----------------------------------------------------------------------------------------------

    def load(self, lowered: lowering.Lowered, prefix: str) -> Callable[[list[Any]], Any]:
        """The `call` of a generated module; what it allocates is named with this prefix."""
        self._prefix = prefix
        space: dict[str, Any] = {"__name__": "generated", "__file__": "generated"}
        with lowering.kernels_not_built(_Stub):
            exec(compile(_instrumented(lowered.source), "generated", "exec"), space)
        for name, value in space.items():
            if isinstance(value, _Stub):
                value.name, value.run_on = name, self
        space.update(
            {
                _NAMED: self.name,
                "_no_guard": lambda index: contextlib.nullcontext(),
                "_no_device": lambda index: None,
                "extern_kernels": _Extern(self),
                "copy_if_misaligned": lambda tensor: tensor,
                "reinterpret_tensor": _reinterpret,
            }
        )
        for name in [name for name in space if name.startswith("empty_strided_")]:
            space[name] = self.allocate if name == f"empty_strided_{self.device.type}" else self.foreign
        for name, constant in lowered.constants.items():
            space[name] = self.foreign(constant.shape, constant.stride(), constant.dtype)
        call: Callable[[list[Any]], Any] = space["call"]
        return call


class _Stub:
    """Stands for a kernel; called as C++ kernels are, or by `run` as Triton's."""

    name = ""
    run_on: HostRun

    def __call__(self, *arguments: Any) -> None:
        self.run_on.launched(self.name)

    def run(self, *arguments: Any, **keywords: Any) -> None:
        self.run_on.launched(self.name)


class _Extern:
    """Stands for Inductor's `extern_kernels`: a result given is written, else the operator makes one."""

    def __init__(self, host: HostRun) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.aten, name, None)
        if operator is None:
            raise UnsupportedGraph(f"the generated code calls {name}, which is no operator of aten")

        def run(*arguments: Any, out: Tensor | None = None, **keywords: Any) -> Any:
            if out is None:
                return operator(*arguments, **keywords)
            self.host.called(Call(operator, arguments, keywords), out)
            return out

        return run


def _alike(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def _mutable_bytes(operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that an operator reads and writes that writes arguments; a result given (`out=`) is not read."""
    read = written = 0
    for place, argument in enumerate(operator._schema.arguments):
        given = arguments[place] if place < len(arguments) else keywords.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        written += _bytes(given) if writes else 0
        read += 0 if writes and argument.kwarg_only else _bytes(given)
    return read, written


def _bytes(values: Any) -> int:
    """Bytes of the tensors in it; of one that repeats its elements, those that it has."""
    found = 0
    for tensor in torch.utils._pytree.tree_leaves(values):
        if isinstance(tensor, Tensor):
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            found += tensor.itemsize * math.prod(size for size, stride in steps if stride)
    return found


def _reinterpret(tensor: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, shape, stride, tensor.storage_offset() + offset)


_NAMED: Final = "_named_"


def _instrumented(source: str) -> str:
    """The module's text, reporting the name of everything that its functions assign."""
    source = source.replace("torch.cuda._DeviceGuard", "_no_guard").replace("torch.cuda.set_device", "_no_device")
    tree = ast.parse(source)
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        if function.name == "call" or function.name.startswith("partition_"):
            function.body = _reporting(function.body)
    return ast.unparse(ast.fix_missing_locations(tree))


def _reporting(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for statement in body:
        found.append(statement)
        for field_name in ("body", "orelse"):
            if getattr(statement, field_name, None):
                setattr(statement, field_name, _reporting(getattr(statement, field_name)))
        for target in statement.targets if isinstance(statement, ast.Assign) else ():
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            found += [_report(part.id) for part in parts if isinstance(part, ast.Name)]
    return found


def _report(name: str) -> ast.stmt:
    return ast.parse(f"{_NAMED}({name!r}, {name})").body[0]
