"""What Inductor would make of a partition, without building or running a kernel: memory, kernels, traffic, time.

Both graphs are lowered (`torch_internals_lowering.lower`) and the host side of what was written is executed on meta
tensors (`hostcode`), forward and backward as AOTAutograd would: outputs held to the end, saved values given away. The
peak is that of the real run to the byte, but for what libraries take for themselves on a GPU (workspaces).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, fx

from remat import scratch, torch_internals
from remat.costs import NOMINAL_SIZE
from remat.devices import Device
from remat.hostcode import Block, HostRun, Launch
from remat.joint import JointGraph
from remat.passes.normalize import copy_module
from remat.passes.partition import Partition
from remat.torch_internals_lowering import Kernel, Lowered, donated_inputs, lower

# The CUDA caching allocator hands out multiples of this.
CUDA_BLOCK_BYTES: Final = 512


@dataclass(frozen=True)
class Alive:
    """A buffer alive at the peak: its name in the generated code, the FX nodes whose results it holds, its bytes."""

    buffer: str
    nodes: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, eq=False)
class DryRun:
    """A training step as Inductor would run it.

    events: signed bytes of every allocation and release, the first `boundary` of them the forward's. blocks: every
    piece of memory. launches: what ran, in order; scratch_bytes: what each took for itself meanwhile.
    lowering_seconds, run_seconds: what lowering and executing the host code took here.
    """

    forward: Lowered
    backward: Lowered
    events: tuple[int, ...]
    boundary: int
    blocks: tuple[Block, ...]
    launches: tuple[Launch, ...]
    scratch_bytes: tuple[int, ...]
    run_seconds: float

    @cached_property
    def alive_bytes(self) -> tuple[int, ...]:
        """Bytes alive after each event, without scratch."""
        return tuple(itertools.accumulate(self.events))

    @cached_property
    def _highest(self) -> tuple[int, int]:
        """The peak and how many events came before it."""
        alive = (0, *self.alive_bytes)
        moments = [(bytes_, -event) for event, bytes_ in enumerate(alive)]
        launched = zip(self.launches, self.scratch_bytes, strict=True)
        moments += [(alive[launch.event] + own, -launch.event) for launch, own in launched]
        highest, event = max(moments)
        return highest, -event

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any moment, above those of the inputs."""
        return self._highest[0]

    @property
    def end_bytes(self) -> int:
        """Bytes alive at the end: outputs and gradients."""
        return sum(self.events)

    @property
    def saved_bytes(self) -> int:
        """Bytes alive between forward and backward: outputs and saved values."""
        return sum(self.events[: self.boundary])

    @property
    def alive_at_peak(self) -> tuple[Alive, ...]:
        """What is alive at the peak, largest first, scratch left out."""
        event = self._highest[1]
        origins = {f"forward {name}": nodes for name, nodes in self.forward.origins.items()}
        origins |= {f"backward {name}": nodes for name, nodes in self.backward.origins.items()}
        found = []
        for block in self.blocks:
            if block.born < event and (block.freed is None or block.freed >= event):
                name = block.name_at(event)
                found.append(Alive(name, origins.get(name, ()), block.bytes))
        return tuple(sorted(found, key=lambda alive: -alive.bytes))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What runs after fusion, forward first."""
        return self.forward.kernels + self.backward.kernels

    @property
    def extern_launches(self) -> tuple[Launch, ...]:
        """Calls of operators outside of the generated kernels."""
        return tuple(launch for launch in self.launches if launch.extern)

    @property
    def traffic_bytes(self) -> int:
        """Bytes read and written: by generated kernels as Inductor counts them, by operators outside once each."""
        parts: tuple[Kernel | Launch, ...] = (*self.kernels, *self.extern_launches)
        return sum(part.read_bytes + part.written_bytes for part in parts)

    @property
    def extern_flops(self) -> int:
        """FLOPs of the operators outside of the generated kernels."""
        return sum(launch.flops for launch in self.extern_launches)

    @property
    def kernel_count(self) -> int:
        """Generated kernels that differ: one may be launched several times."""
        return len({launch.name for launch in self.launches if not launch.extern})

    @property
    def kernel_launches(self) -> int:
        """Launches of generated kernels."""
        return sum(not launch.extern for launch in self.launches)

    @property
    def lowering_seconds(self) -> float:
        """What lowering both graphs took here."""
        return self.forward.seconds + self.backward.seconds

    def step_seconds(self, device: Device) -> float:
        """The roofline of a step: traffic's time, or FLOPs' where an operator outside takes longer, and launches."""
        total = len(self.launches) * device.launch_seconds
        total += sum(k.read_bytes + k.written_bytes for k in self.kernels) / device.bytes_per_second
        for launch in self.extern_launches:
            moved = (launch.read_bytes + launch.written_bytes) / device.bytes_per_second
            total += max(moved, launch.flops / device.flops_per_second(launch.itemsize))
        return total


def dry_run_partition(
    partition: Partition,
    joint: JointGraph,
    patches: Mapping[str, Any] | None = None,
    forwards: dict[str, Lowered] | None = None,
) -> DryRun:
    """Lower a partition for the device its tensors are on, and run its host code on meta tensors.

    patches: settings of Inductor to lower under. forwards: of this joint graph those lowered before, by their code;
    a new one is put there. The partition's graphs are left as they were.
    """
    device = joint.device
    forward, backward = lower_both(partition, joint, patches, forwards)
    host = HostRun(device, CUDA_BLOCK_BYTES if device.type == "cuda" else 1)
    started = time.perf_counter()
    with torch_internals.sizes_at_hand():
        boundary = _run(host, forward, backward, partition, joint)
    seconds = time.perf_counter() - started
    own = _scratch(host) if device.type == "cpu" else [0] * len(host.launches)
    return DryRun(
        forward, backward, tuple(host.events), boundary, tuple(host.blocks), tuple(host.launches), tuple(own), seconds
    )


def lower_both(
    partition: Partition,
    joint: JointGraph,
    patches: Mapping[str, Any] | None = None,
    forwards: dict[str, Lowered] | None = None,
) -> tuple[Lowered, Lowered]:
    """Lower the forward and the backward of a partition, which is left as it was; see `dry_run_partition`."""
    seen = range(joint.num_written_inputs, joint.num_fwd_outputs)
    known, code = {} if forwards is None else forwards, partition.forward.code
    if code not in known:
        known[code] = lower(copy_module(partition.forward), False, seen, (), patches or {})
    forward = known[code]
    donated = donated_inputs(partition.forward, partition.backward, joint.num_fwd_outputs, partition.num_sizes)
    module = copy_module(partition.backward)
    _take_strides(module, forward, partition, joint)
    gradients: Any = module.graph.output_node().args[0]
    return forward, lower(module, True, range(len(gradients)), donated, patches or {})


def _take_strides(backward: fx.GraphModule, forward: Lowered, partition: Partition, joint: JointGraph) -> None:
    """Give saved values the strides that the forward's code returns them with, as AOTAutograd does.

    Not where sizes are symbolic: the strides are numbers, and comparing would make the sizes numbers too.
    """
    saved = forward.strides[joint.num_fwd_outputs :]
    tensors = saved[: len(saved) - partition.num_sizes]
    placeholders = backward.graph.find_nodes(op="placeholder")[partition.num_sizes :]
    for node, strides in zip(placeholders, tensors, strict=False):
        value = node.meta["val"]
        if strides is None or any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
            continue
        if tuple(value.stride()) != strides:
            with value.fake_mode:
                node.meta["val"] = value.as_strided(value.shape, strides)


def _run(host: HostRun, forward: Lowered, backward: Lowered, partition: Partition, joint: JointGraph) -> int:
    """Run both; returns how many events the forward had."""
    inputs = [_like(node.meta["val"], host.foreign) for node in _placeholders(partition.forward)]
    with host:
        results = list(host.load(forward, "forward ")(list(inputs)))
    outputs, saved = results[: joint.num_fwd_outputs], results[joint.num_fwd_outputs :]
    del results
    boundary = len(host.events)
    tensors = len(saved) - partition.num_sizes
    given = [*saved[tensors:], *saved[:tensors]]
    tangents = [_like(node.meta["val"], host.allocate) for node in _placeholders(partition.backward)[len(given) :]]
    held = [tangent for tangent in tangents if isinstance(tangent, Tensor) and tangent.ndim == 0]
    given += tangents
    del saved, tangents
    with host:
        gradients = host.load(backward, "backward ")(given)
    del given, held
    host.stop()
    del outputs, gradients
    return boundary


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _like(value: Any, make: Callable[..., Tensor]) -> Any:
    """A tensor like this one; a number is itself, a symbolic one nominal."""
    if not isinstance(value, Tensor):
        return torch_internals.nominal_size(value, NOMINAL_SIZE) if isinstance(value, torch.SymInt) else value
    shape, stride = (
        [torch_internals.nominal_size(size, NOMINAL_SIZE) for size in part] for part in (value.shape, value.stride())
    )
    return make(shape, stride, value.dtype)


def _scratch(host: HostRun) -> list[int]:
    """Bytes that each launch takes for itself: operators outside of the kernels are run once, on zeros."""
    wanted = [call for call in host.calls if call is not None and not scratch.is_without_scratch(call.operator)]
    found = dict(zip(map(id, wanted), scratch.scratch_of(wanted), strict=True))
    return [found.get(id(call), 0) for call in host.calls]
