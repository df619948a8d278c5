"""How many bytes of tensors a training step keeps alive, exactly and repeatably.

On a CPU a counting allocator (`allocator.cpp`) sees every tensor storage of every thread, of eager operators
and of Inductor's buffers alike; it does not see scratch that a kernel takes with `malloc`, nor tensors over
foreign memory (`from_numpy`, `mmap`). On a GPU the numbers are those of the CUDA caching allocator, rounded
to its 512-byte blocks.

**Peak** always means: gradients set to None first; the most bytes alive between the start of the forward and
the end of the backward above what was alive before. Parameters, buffers, optimizer state and inputs do not
count; new gradients do.

`capped` proves a peak by force: what would be alive beyond it is refused.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.native import AllocatorLibrary, load_allocator

T = TypeVar("T")
Events = NDArray[np.int64]

CUDA_BLOCK_BYTES = 512
# Freed memory leaves the allocator's count when the release is asked for, not when it has completed.
CUDA_EVENT_SIGNS = {"alloc": 1, "free_requested": -1}


@dataclass(frozen=True)
class Measurement(Generic[T]):
    """What a call needed: bytes above those alive at its start, at the highest moment and at the end."""

    peak_bytes: int
    end_bytes: int
    result: T


@dataclass(frozen=True)
class StepMemory:
    """One forward and backward, in bytes above those alive before.

    `saved_bytes` is what the forward leaves for the backward, without the loss itself. `events` are the
    signed sizes of all allocations (+) and releases (-) in the order of time; the first `boundary` of them
    are the forward's. On a GPU the events are the bytes asked for, before rounding to blocks.
    """

    saved_bytes: int
    peak_bytes: int
    end_bytes: int
    events: Events
    boundary: int

    def alive_bytes(self) -> Events:
        """Bytes alive after each event."""
        return np.cumsum(self.events)


class Meter(Protocol):
    """The counters of one device, in bytes."""

    def live(self) -> int: ...
    def peak(self) -> int: ...
    def reset_peak(self) -> None: ...
    def rounded(self, size_bytes: int) -> int: ...
    def start_events(self) -> None: ...
    def event_count(self) -> int: ...
    def stop_events(self) -> Events: ...
    def capped(self, bytes_above_entry: int) -> contextlib.AbstractContextManager[None]: ...


class CpuMeter:
    """Counts every CPU storage made after its construction."""

    def __init__(self) -> None:
        self._library: AllocatorLibrary = load_allocator()

    def live(self) -> int:
        return self._library.live()

    def peak(self) -> int:
        return self._library.peak()

    def reset_peak(self) -> None:
        self._library.reset_peak()

    def rounded(self, size_bytes: int) -> int:
        return size_bytes

    def start_events(self) -> None:
        self._library.record(True)

    def event_count(self) -> int:
        return self._library.event_count()

    def stop_events(self) -> Events:
        self._library.record(False)
        return self._library.read_events()

    @contextlib.contextmanager
    def capped(self, bytes_above_entry: int) -> Iterator[None]:
        limit = self._library.live() + bytes_above_entry
        before = self._library.set_limit(limit)
        try:
            # A wider cap within a narrower one does not widen it.
            if before is not None and before < limit:
                self._library.set_limit(before)
            yield
        finally:
            self._library.set_limit(before)


class CudaMeter:
    """The CUDA caching allocator's own counters, and its memory history for the events."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self._index = torch.cuda.current_device() if device.index is None else device.index

    def live(self) -> int:
        return torch.cuda.memory_allocated(self._index)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._index)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)

    def rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES

    def start_events(self) -> None:
        torch.cuda.memory._record_memory_history("all", context=None, clear_history=True, device=self._index)

    def event_count(self) -> int:
        return self._events().size

    def stop_events(self) -> Events:
        events = self._events()
        torch.cuda.memory._record_memory_history(None, device=self._index)
        return events

    @contextlib.contextmanager
    def capped(self, bytes_above_entry: int) -> Iterator[None]:
        """The limit is on what the caching allocator takes from the driver, in segments of 2 MiB and more."""
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self._index).total_memory
        limit = (torch.cuda.memory_reserved(self._index) + bytes_above_entry) / total
        before = torch.cuda.get_per_process_memory_fraction(self._index)
        torch.cuda.set_per_process_memory_fraction(min(limit, before), self._index)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self._index)

    def _events(self) -> Events:
        trace = torch.cuda.memory._snapshot()["device_traces"][self._index]
        signed = [
            CUDA_EVENT_SIGNS[entry["action"]] * entry["size"]
            for entry in trace
            if entry["action"] in CUDA_EVENT_SIGNS
        ]
        return np.array(signed, dtype=np.int64)


_meters: dict[str, Meter] = {}


def install(device: str = "cpu") -> Meter:
    """Start counting on `device`, once per process; call it before making the tensors that should count."""
    kind = torch.device(device).type
    if device not in _meters:
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"no memory meter for device {device!r}: only cpu and cuda have one")
        _meters[device] = CpuMeter() if kind == "cpu" else CudaMeter(torch.device(device))
    return _meters[device]


def measure(call: Callable[[], T], device: str = "cpu") -> Measurement[T]:
    """Run `call()` and say how many bytes it had alive above those at its start."""
    meter = install(device)
    gc.collect()
    before = meter.live()
    meter.reset_peak()
    result = call()
    return Measurement(meter.peak() - before, meter.live() - before, result)


@contextlib.contextmanager
def capped(bytes_above_entry: int, device: str = "cpu") -> Iterator[None]:
    """Refuse whatever would make more than this many bytes alive above those alive now.

    What is refused raises torch.OutOfMemoryError, a RuntimeError, and is counted nowhere. Caps nest: the narrowest
    holds. On a CPU only what was made after `install` counts as alive, and all threads share the cap. Raises
    ValueError for a negative size.
    """
    if bytes_above_entry < 0:
        raise ValueError(f"a cap of {bytes_above_entry} bytes: it may not be negative")
    meter = install(device)
    gc.collect()
    with meter.capped(bytes_above_entry):
        yield


def step_memory(
    forward: Callable[[], Tensor], parameters: Iterable[Tensor], device: str = "cpu"
) -> StepMemory:
    """Run `forward()` and the backward of the loss it returns, with fresh gradients for `parameters`."""
    meter = install(device)
    for parameter in parameters:
        parameter.grad = None
    gc.collect()
    before = meter.live()
    meter.reset_peak()
    meter.start_events()
    loss = forward()
    saved_bytes = meter.live() - before - meter.rounded(loss.untyped_storage().nbytes())
    boundary = meter.event_count()
    loss.backward()
    peak_bytes = meter.peak() - before
    events = meter.stop_events()
    del loss
    return StepMemory(saved_bytes, peak_bytes, meter.live() - before, events, boundary)


def saved_tensor_bytes(forward: Callable[[], Tensor], excluded: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages that autograd saves in `forward()`, without those of `excluded`.

    A witness for `StepMemory.saved_bytes` that needs no allocator. Pass parameters, buffers and inputs as
    `excluded`: they are alive anyway.
    """
    skipped = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skipped:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    # The saved tensors had to stay alive until here: a freed address may be used twice.
    del loss
    return sum(sizes.values())
