"""Operators of a graph timed on the device, with the shapes, strides and dtypes that they have in it.

Timed is what Inductor calls outside of its generated kernels: matrix products, convolutions, attention, and operators
of torch's own that it has no code for. Each distinct call is run on made-up numbers and its fastest run counts: what
disturbs a run only makes it slower. Arguments lie in the cache from the run before, where they fit.

Timings outlive the process in a document. One that is there is never changed, so that every process prices alike. They
hold for one machine, number of threads and setting of TF32: the name of the document must tell those apart.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from remat import costs, devices, ops, torch_internals
from remat.devices import Device
from remat.joint import JointGraph
from remat.ops import Kind
from remat.scratch import Call
from remat.store import Document, Store

logger = logging.getLogger("remat")
aten = torch.ops.aten

# What timing the operators of one graph may add to its compilation, which takes tens of seconds itself.
PROFILE_SECONDS: Final = 6.0
# What timing one operator may take after its first runs: an operator slower than that is timed by a single run, which
# is as good, since noise is a matter of microseconds to a few milliseconds.
OPERATOR_SECONDS: Final = 0.5
GRID_SECONDS: Final = 4.0
# Runs go on until they took so long together, or are so many; on a shared machine the fastest of fewer than three is
# often one that was disturbed.
_ENOUGH_SECONDS: Final = 0.01
_FEWEST_RUNS: Final = 3
_MOST_RUNS: Final = 20
# The GPU spins while the host queues the runs, or short kernels would be timed at the host's speed: 20 calls from
# Python take some 0.3 ms, this about 1 ms at 2 GHz.
_SPIN_CYCLES: Final = 2_000_000
# Drawn once and repeated over an argument: drawing 16 million numbers takes 0.1 s, and arithmetic does not notice.
_DRAWN: Final = 2**16 - 1
FAMILIES: Final = ("matmul", "convolution", "attention", "other")
DIMS: Final = 4

# Where the first matrix stands among the arguments.
_MATMULS: Final = {
    aten.mm: 0, aten.bmm: 0, aten.mv: 0, aten.dot: 0, aten._scaled_mm: 0, aten._int_mm: 0,
    aten.addmm: 1, aten.baddbmm: 1, aten.addbmm: 1, aten.addmv: 1,
}  # fmt: skip
# Arguments of attention that random numbers or zeros would not suit: a mask that hides all makes NaN.
_ONES: Final = frozenset({"logsumexp", "log_sumexp", "attn_mask"})
_PLAIN: Final = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, type(None))


@dataclass(frozen=True)
class Operator:
    """One call of an operator, by what decides its time.

    key: the operator, each tensor's dtype, device type, shape and strides, the other arguments; the same in every
        process.
    family: of FAMILIES. flops: by torch's counter. bytes: of arguments and results, each once.
    dims: its characteristic sizes: of a matmul batch, m, n, k; of a convolution positions, input channels of a group,
        output channels, taps of the kernel; of attention batch * heads, rows, columns, depth; of others none.
    itemsize: bytes of an element of its first tensor.
    """

    key: str
    family: str
    flops: int
    bytes: int
    dims: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Sample(Operator):
    """An operator and the seconds that it took."""

    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        return {**dataclasses.asdict(self), "dims": list(self.dims)}

    @classmethod
    def from_dict(cls, data: Any) -> Sample:
        """The sample of `to_dict`; a ValueError for what is none."""
        try:
            sample = cls(**{**data, "dims": tuple(data["dims"])})
            numbers = [sample.flops, sample.bytes, sample.itemsize, *sample.dims]
            sound = (
                isinstance(sample.key, str)
                and sample.family in FAMILIES
                and len(sample.dims) == (0 if sample.family == "other" else DIMS)
                and all(type(number) is int and number >= 0 for number in numbers)
                and type(sample.seconds) in (int, float)
                and 0 < sample.seconds < math.inf
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"no timed operator: {error}") from error
        if not sound:
            raise ValueError(f"no timed operator: {data!r}")
        return sample


def roofline_seconds(operator: Operator, device: Device) -> float:
    """What the device's figures say: the larger of arithmetic and traffic, and what calling an operator costs."""
    arithmetic = operator.flops / device.flops_per_second(operator.itemsize, operator.family)
    traffic = operator.bytes / device.bytes_per_second
    return max(arithmetic, traffic) + (device.extern_seconds or device.launch_seconds)


# --- what an operator is -------------------------------------------------------------------------------------------


def describe(node: fx.Node) -> Operator | None:
    """The operator of a node; None for what is not timed.

    That is what Inductor generates code for, views, custom operators, what writes an argument or draws random numbers,
    and symbolic sizes.
    """
    call = _call_of(node)
    return None if call is None else _described(call, node.meta["val"], costs.flops(node))


def _call_of(node: fx.Node) -> Call | None:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    kind = ops.kind(node)
    if kind is not Kind.CONTRACTION and not (kind is Kind.EXTERN and torch_internals.runs_as_torch_has_it(target)):
        return None
    if ops.is_mutating(node) or ops.draws_random_numbers(node) or torch_internals.has_unbacked_bindings(node):
        return None
    if not all("val" in value.meta for value in (node, *node.all_input_nodes)):
        return None
    arguments, keywords = torch.utils._pytree.tree_map(_value, (node.args, node.kwargs))
    leaves = [*torch.utils._pytree.tree_leaves((arguments, keywords)), *costs.tensors_of(node.meta["val"])]
    if not all(map(_is_concrete, leaves)) or not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    return Call(target, tuple(arguments), keywords)


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _is_concrete(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        numbers = (*value.shape, *value.stride()) if value.layout is torch.strided else (None,)
        return all(isinstance(number, int) for number in numbers)
    return isinstance(value, (*_PLAIN, torch.device))


def _described(call: Call, result: Any, flops: int) -> Operator:
    packet = call.operator.overloadpacket
    leaves = torch.utils._pytree.tree_leaves((call.arguments, dict(call.keywords)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    results = costs.tensors_of(result)
    family, dims = _family(packet, call.arguments, results)
    moved = costs.tensor_bytes(tensors) + costs.tensor_bytes(results)
    itemsize = (tensors or results)[0].dtype.itemsize
    return Operator(_key(call), family, flops, moved, dims, itemsize)


def _family(packet: Any, arguments: Sequence[Any], results: Sequence[torch.Tensor]) -> tuple[str, tuple[int, ...]]:
    """Its family and characteristic sizes; `other` for relatives whose arguments stand elsewhere (varlen attention)."""
    name = packet.__name__
    if packet in _MATMULS:
        first, second = arguments[_MATMULS[packet] :][:2]
        batch = first.shape[0] if first.ndim == 3 else 1
        rows = first.shape[-2] if first.ndim > 1 else 1
        columns = second.shape[-1] if second.ndim > 1 else 1
        return "matmul", (batch, rows, columns, first.shape[-1])
    if name in ("convolution", "convolution_backward"):
        is_backward = name == "convolution_backward"
        value, weight = arguments[1:3] if is_backward else arguments[:2]
        is_transposed = arguments[7] if is_backward else arguments[6]
        # Each position of the smaller side meets each tap once: of the result, or of a transposed one's input.
        side = value if is_transposed else (arguments[0] if is_backward else results[0])
        positions = side.shape[0] * math.prod(side.shape[2:])
        inputs, outputs = (weight.shape[0], weight.shape[1]) if is_transposed else (weight.shape[1], weight.shape[0])
        return "convolution", (positions, inputs, outputs, math.prod(weight.shape[2:]))
    if name.startswith("_scaled_dot_product"):
        query, key = arguments[1:3] if name.endswith("_backward") else arguments[:2]
        if query.ndim == key.ndim == 4:
            batch, heads, rows, depth = query.shape
            return "attention", (batch * heads, rows, key.shape[2], depth)
    return "other", ()


def _key(call: Call) -> str:
    keywords = [f"{name}={_text(value)}" for name, value in sorted(call.keywords.items())]
    return f"{call.operator}({', '.join([*map(_text, call.arguments), *keywords])})"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {value.device.type} {list(value.shape)} {list(value.stride())}"
    if isinstance(value, torch.device):
        return value.type
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list | tuple) else repr(value)


# --- timing --------------------------------------------------------------------------------------------------------


def time_operators(joint: JointGraph, known: Mapping[str, Any], limit_seconds: float) -> list[Sample]:
    """Time what a graph calls and `known` does not hold the key of, for about `limit_seconds`.

    What the graph spends most on by the roofline comes first; what does not fit stays out, as do operators that raise
    on made-up arguments (logged) and those that would take more than half of the free memory.
    """
    found: dict[str, tuple[Operator, Call]] = {}
    counts: dict[str, int] = {}
    for node in joint.nodes:
        call, operator = _call_of(node), describe(node)
        if call is not None and operator is not None and operator.key not in known:
            found[operator.key] = operator, call
            counts[operator.key] = counts.get(operator.key, 0) + 1
    figures = devices.figures(joint.device)

    def spent(item: tuple[Operator, Call]) -> tuple[float, str]:
        return -counts[item[0].key] * roofline_seconds(item[0], figures), item[0].key

    return _time(sorted(found.values(), key=spent), joint.device, limit_seconds)


def seconds_of(
    joint: JointGraph, store: Store, name: str, limit_seconds: float = PROFILE_SECONDS
) -> dict[fx.Node, float]:
    """The seconds of the nodes that were timed: from the document `name`, or now and kept there.

    What could not be timed, or not within the limit, is left out for good: prices must not depend on who asks first.
    """
    described = {node: operator for node in joint.nodes if (operator := describe(node)) is not None}
    _, known = load(store, name)
    settled = set(known) | set(left_out(store, name))
    if any(operator.key not in settled for operator in described.values()):
        new = time_operators(joint, dict.fromkeys(settled), limit_seconds)
        known = add(store, name, new, [operator.key for operator in described.values()])
    return {node: known[operator.key].seconds for node, operator in described.items() if operator.key in known}


def _time(
    calls: Sequence[tuple[Operator, Call]],
    device: torch.device,
    limit_seconds: float,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    if not (device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())):
        return []
    figures = devices.figures(device)
    ended = time.perf_counter() + limit_seconds
    samples: list[Sample] = []
    measured = expected = 0.0
    with _undisturbed(device):
        for position, (operator, call) in enumerate(calls):
            left = ended - time.perf_counter()
            if left <= 0:
                logger.info("%d operators are not timed: %g s are over", len(calls) - position, limit_seconds)
                break
            guess = roofline_seconds(operator, figures)
            # By how much those before it took longer than the roofline said.
            if max(1.0, measured / expected if expected else 1.0) * guess > left:
                continue
            seconds = _seconds(operator, call, device, min(OPERATOR_SECONDS, left))
            if seconds is not None:
                samples.append(Sample(**dataclasses.asdict(operator), seconds=seconds))
                measured, expected = measured + seconds, expected + guess
            if progress is not None:
                progress(position + 1, len(calls))
    return samples


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Nothing of the compilation around: no fake tensors, no autocast, no gradients, its random state kept."""
    indices = [device.index or 0] if device.type == "cuda" else []
    with (
        torch_internals.real_tensors(),
        torch.random.fork_rng(devices=indices, enabled=True),
        torch.autocast(device.type, enabled=False),
        torch.no_grad(),
    ):
        yield


def _seconds(operator: Operator, call: Call, device: torch.device, allowed: float) -> float | None:
    if 2 * operator.bytes > free_bytes(device):
        logger.info("%s is not timed: it would take more than half of the free memory", operator.key)
        return None
    try:
        run = _prepared(call, device)
        return _best(run, device, allowed)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        logger.warning("%s is not timed, it does not run on random numbers: %s", operator.key, error)
        return None


def _prepared(call: Call, device: torch.device) -> Callable[[], Any]:
    declared = [argument.name for argument in call.operator._schema.arguments]
    arguments = [_made(value, name, device) for value, name in zip(call.arguments, declared, strict=False)]
    keywords = {name: _made(value, name, device) for name, value in call.keywords.items()}
    return lambda: call.operator(*arguments, **keywords)


def _made(value: Any, name: str, device: torch.device) -> Any:
    """A real argument like this one: small random numbers, zeros for integers, which are legal indices."""
    if isinstance(value, list | tuple):
        return [_made(item, name, device) for item in value]
    if not isinstance(value, torch.Tensor):
        return device if isinstance(value, torch.device) and value.type == device.type else value
    where = device if value.device.type == device.type else value.device
    spans = [(size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)]
    count = 1 + sum(spans) if value.numel() else 0
    if name in _ONES:
        memory = torch.ones(count, dtype=value.dtype, device=where)
    elif value.dtype.is_floating_point or value.dtype.is_complex:
        drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)).mul_(0.1)
        drawn = drawn[:count].to(device=where, dtype=value.dtype)
        memory = drawn.repeat(math.ceil(count / _DRAWN)) if count > _DRAWN else drawn
    else:
        memory = torch.zeros(count, dtype=value.dtype, device=where)
    return memory.as_strided(value.shape, value.stride())


def _best(run: Callable[[], Any], device: torch.device, allowed: float) -> float:
    """Seconds of the fastest run."""
    timed = _timed_on_gpu if device.type == "cuda" else _timed_on_cpu
    timed(run, 1)  # what libraries prepare once
    (first,) = timed(run, 1)
    wanted = min(max(math.ceil(_ENOUGH_SECONDS / first), _FEWEST_RUNS), _MOST_RUNS) - 1
    more = min(wanted, int(allowed / first))
    return min([first, *timed(run, more)])


def _timed_on_cpu(run: Callable[[], Any], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        result = run()
        # A clock that did not tick: no operator is free.
        seconds.append(max(time.perf_counter() - started, 1e-9))
        del result
    return seconds


def _timed_on_gpu(run: Callable[[], Any], count: int) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize()
    torch_internals.keep_gpu_busy(_SPIN_CYCLES)
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [max(start.elapsed_time(end) * 1e-3, 1e-9) for start, end in pairs]


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be had on a device; where a CPU's system does not tell, all of its memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    table = Path("/proc/meminfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # elsewhere only what there is in all is told


# --- the document --------------------------------------------------------------------------------------------------


def load(store: Store, name: str) -> tuple[str, dict[str, Sample]]:
    """The document's generation, which changes when it is made anew ("" where there is none), and its timings by key.

    Malformed entries are left out.
    """
    document = store.read(name)
    return _generation(document) or "", _samples(document)


def left_out(store: Store, name: str) -> list[str]:
    """The keys of operators that a compilation met and did not time."""
    document = store.read(name) or {}
    listed = document.get("left_out")
    return [key for key in listed if isinstance(key, str)] if isinstance(listed, list) else []


def add(store: Store, name: str, samples: Sequence[Sample], met: Sequence[str] = ()) -> dict[str, Sample]:
    """Put timings into the document and return all that is there then: what was there before stays as it was.

    met: keys of operators that are left out from now on where they were not timed.
    """

    def change(document: Document | None) -> Document:
        before = (document or {}).get("left_out")
        out = set(before) if isinstance(before, list) else set()
        given = {sample.key: sample for sample in samples if sample.key not in out}
        stored = given | _samples(document)
        return {
            "generation": _generation(document) or secrets.token_hex(8),
            "samples": {key: sample.to_dict() for key, sample in sorted(stored.items())},
            "left_out": sorted((out | set(met)) - set(stored)),
        }

    return _samples(store.update(name, change))


def _generation(document: Document | None) -> str | None:
    found = None if document is None else document.get("generation")
    return found if isinstance(found, str) else None


def _samples(document: Document | None) -> dict[str, Sample]:
    entries = None if document is None else document.get("samples")
    found: dict[str, Sample] = {}
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        try:
            sample = Sample.from_dict(entry)
        except ValueError as error:
            logger.warning("a stored timing is left out: %s", error)
            continue
        if sample.key == key:
            found[key] = sample
    return found


# --- a grid, to know something before the first graph -----------------------------------------------------------------

_MATRICES: Final = (  # m, k, n: square, skinny, and as of linear layers with their gradients
    (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (64, 2048, 64),
    (2048, 64, 64), (64, 64, 2048), (2048, 64, 2048), (512, 64, 64), (64, 512, 128), (128, 1024, 256),
    (256, 128, 1024), (1024, 256, 256), (1024, 256, 1024), (256, 1024, 256), (2048, 128, 512), (512, 2048, 128),
    (1, 1024, 1024), (16, 512, 2048), (2048, 512, 16), (2048, 256, 1024),
)  # fmt: skip
_BATCHES: Final = (  # batch, m, k, n
    (8, 64, 64, 64), (16, 128, 64, 128), (16, 128, 128, 64), (32, 64, 32, 64), (4, 256, 64, 256), (4, 256, 256, 64),
    (64, 16, 64, 16), (8, 512, 64, 512),
)  # fmt: skip
_IMAGES: Final = (  # batch, input channels, output channels, height and width, kernel
    (4, 3, 16, 32, 3), (4, 16, 16, 32, 3), (4, 16, 32, 32, 1), (8, 32, 32, 16, 3), (8, 64, 64, 16, 1),
    (8, 64, 64, 16, 3), (8, 128, 128, 8, 3), (8, 128, 256, 8, 1), (2, 3, 64, 64, 3), (2, 64, 64, 32, 1),
    (2, 256, 256, 8, 3), (16, 64, 128, 8, 1), (2, 32, 64, 56, 3), (4, 256, 64, 14, 1), (4, 128, 128, 16, 1),
    (8, 16, 64, 16, 3), (2, 16, 16, 64, 1), (16, 32, 32, 8, 3),
)  # fmt: skip
_HEADS: Final = (  # batch, heads, rows and columns, depth
    (1, 2, 64, 32), (2, 4, 64, 64), (2, 8, 128, 32), (2, 8, 128, 64), (4, 8, 64, 64), (1, 4, 256, 64),
    (2, 4, 256, 32), (1, 8, 512, 64), (4, 6, 128, 64), (2, 2, 512, 32), (8, 4, 32, 32), (1, 2, 1024, 64),
    (1, 12, 128, 64), (3, 2, 384, 64), (4, 12, 64, 16),
)  # fmt: skip


def time_grid(
    device: torch.device,
    limit_seconds: float = GRID_SECONDS,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """Time matrix products, convolutions and attention of common shapes, for about `limit_seconds`.

    float32, on a GPU also bfloat16. progress: called with how many are done and how many there are. Cheap ones first:
    on a slow machine those are the ones that fit.
    """
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    with torch_internals.fake_tensors(), torch.no_grad():
        calls = [call for dtype in dtypes for call in _grid(device, dtype)]
    found = {operator.key: (operator, call) for operator, call in calls}
    figures = devices.figures(device)
    ordered = sorted(found.values(), key=lambda item: (roofline_seconds(item[0], figures), item[0].key))
    return _time(ordered, device, limit_seconds, progress)


def _grid(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Operator, Call]]:
    """The grid's calls, on the fake tensors of the mode around."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    for position, (m, k, n) in enumerate(_MATRICES):
        yield _called(aten.mm.default, tensor(m, k), tensor(k, n))
        # Every other one as a linear layer calls it, with a bias and its weight transposed.
        if position % 2:
            yield _called(aten.addmm.default, tensor(n), tensor(m, k), tensor(n, k).t())
    for batch, m, k, n in _BATCHES:
        yield _called(aten.bmm.default, tensor(batch, m, k), tensor(batch, k, n))
    for batch, inputs, outputs, size, kernel in _IMAGES:
        value, weight = tensor(batch, inputs, size, size), tensor(outputs, inputs, kernel, kernel)
        rest = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
        yield _called(aten.convolution.default, value, weight, None, *rest)
        gradient = tensor(batch, outputs, size, size)
        mask = [True, True, False]
        yield _called(aten.convolution_backward.default, gradient, value, weight, [0], *rest, mask)
    for shape in _HEADS:
        yield from _attention(tensor(*shape))


def _attention(value: torch.Tensor) -> Iterator[tuple[Operator, Call]]:
    if value.device.type == "cpu":
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        yield _called(forward, value, value, value)
        out, logsumexp = forward(value, value, value)
        yield _called(backward, value, value, value, value, out, logsumexp, 0.0, False)
    elif value.dtype is torch.float32:
        forward = aten._scaled_dot_product_efficient_attention.default
        backward = aten._scaled_dot_product_efficient_attention_backward.default
        yield _called(forward, value, value, value, None, True)
        out, *state = forward(value, value, value, None, True)
        wanted = [True, True, True, False]
        yield _called(backward, value, value, value, value, None, out, *state, 0.0, wanted)
    else:
        forward = aten._scaled_dot_product_flash_attention.default
        backward = aten._scaled_dot_product_flash_attention_backward.default
        yield _called(forward, value, value, value)
        out, *sizes, seed, offset, _ = forward(value, value, value)
        yield _called(backward, value, value, value, value, out, *sizes, 0.0, False, seed, offset)


def _called(operator: Any, *arguments: Any) -> tuple[Operator, Call]:
    call = Call(operator, arguments, {})
    result = operator(*arguments)
    return _described(call, result, costs.call_flops(operator.overloadpacket, arguments, {}, result)), call
