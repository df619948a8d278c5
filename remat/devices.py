"""Figures of devices for the roofline: what a second buys there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True)
class Processor:
    """What Inductor and Triton ask of a GPU when they generate code for it.

    architecture: compute capability as sm_XY has it. shared_bytes: most shared memory of one block.
    """

    architecture: int
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Device:
    """Rates of one device, as sustained figures.

    contraction_flops: multiply-adds counted as two, per second, for matmul-like operators, by width of the
        element in bytes (4: fp32/tf32, 2: fp16/bf16, 1: fp8/int8).
    bytes_per_second: memory bandwidth.
    simple_per_second, transcendental_per_second: pointwise results per second when they are not bound by memory.
    launch_seconds: what one more kernel costs.
    processor: of a GPU, for generating code where none is there.
    """

    name: str
    contraction_flops: tuple[tuple[int, float], ...]
    bytes_per_second: float
    simple_per_second: float
    transcendental_per_second: float
    launch_seconds: float
    processor: Processor | None = None

    def flops_per_second(self, itemsize: int) -> float:
        """Rate for elements of this many bytes; wider ones run at half the rate for each doubling."""
        rates = dict(self.contraction_flops)
        return rates.get(itemsize, rates[4] * 4 / max(itemsize, 4))


# One core of a server CPU with AVX2 or AVX-512, as orders of magnitude; not measured. The evidence for them is
# indirect: the default plans that they lead to took 0.946 to 0.997 of Inductor's step time (bench.compare).
CPU: Final = Device("cpu", ((4, 7e10), (2, 7e10), (1, 7e10)), 1.0e10, 4e9, 6e8, 2e-6)

# From public data sheets (dense, no sparsity), taken at about three quarters; transcendental: 16 results a clock and
# SM. Not measured.
_H100 = Device(
    "H100", ((4, 3.0e14), (2, 7.0e14), (1, 1.4e15)), 2.7e12, 2.5e13, 3.5e12, 2e-6,
    Processor(90, 132, 80 * 2**30, 50 * 2**20, 227 * 1024),
)  # fmt: skip
_H200 = Device(
    "H200", ((4, 3.0e14), (2, 7.0e14), (1, 1.4e15)), 3.9e12, 2.5e13, 3.5e12, 2e-6,
    Processor(90, 132, 141 * 10**9, 50 * 2**20, 227 * 1024),
)  # fmt: skip
_A100 = Device(
    "A100", ((4, 1.1e14), (2, 2.2e14), (1, 4.4e14)), 1.5e12, 7.5e12, 2.4e12, 3e-6,
    Processor(80, 108, 80 * 2**30, 40 * 2**20, 163 * 1024),
)  # fmt: skip
_L4 = Device(
    "L4", ((4, 4e13), (2, 9e13), (1, 1.8e14)), 2.4e11, 1.2e13, 1.8e12, 3e-6,
    Processor(89, 58, 24 * 2**30, 48 * 2**20, 99 * 1024),
)  # fmt: skip
GPUS: Final = (_H200, _H100, _A100, _L4)


_pretended: list[Device] = []


def named(name: str) -> Device:
    """The GPU of this name (`H200`); a ValueError that lists the known ones."""
    for gpu in GPUS:
        if gpu.name.lower() == name.lower():
            return gpu
    raise ValueError(f"target={name!r} is not known: one of {', '.join(gpu.name for gpu in GPUS)}")


def take_cuda_for(gpu: Device) -> None:
    """From now on CUDA tensors of this process have the figures of this GPU; for a process that pretends to have it."""
    _pretended.append(gpu)


def figures(device: torch.device) -> Device:
    """Figures for a torch device; an unknown GPU is taken for an A100, whose ratios are typical."""
    if device.type == "cuda" and _pretended:
        return _pretended[-1]
    if device.type == "cuda" and torch.cuda.is_available():
        full_name = torch.cuda.get_device_name(device)
        return next((gpu for gpu in GPUS if gpu.name in full_name), _A100)
    return _A100 if device.type not in ("cpu", "meta") else CPU
