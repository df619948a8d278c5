"""Figures of devices for the roofline: what a second buys there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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


Rates = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Device:
    """Rates of one device, as sustained figures; what calibration measures, and plain data (`as_dict`).

    contraction_flops: multiply-adds counted as two, per second, for matmul-like operators, by width of the
        element in bytes (4: fp32/tf32, 2: fp16/bf16, 1: fp8/int8). attention_flops, convolution_flops: theirs, where
        they are not the same.
    float32_flops: what a matmul of float32 reaches where TF32 is not allowed, torch's default on a GPU; 0: as `4`.
    bytes_per_second: memory bandwidth of a copy, reads and writes counted. reduction_bytes_per_second: reading for a
        sum, gather_bytes_per_second: rows taken and written by an embedding; 0: the same.
    cache_bytes, cached_bytes_per_second: bandwidth of what touches no more than that; 0: the same.
    simple_per_second, transcendental_per_second: pointwise results per second when they are not bound by memory.
    pointwise_per_second: the same by operator (`tanh`), where it was measured.
    launch_seconds: what one more kernel costs. extern_seconds: what calling an operator outside of the generated
        kernels costs; 0: as a kernel.
    processor: of a GPU, for generating code where none is there; None: no code can be generated for it elsewhere.
    """

    name: str
    contraction_flops: Rates
    bytes_per_second: float
    simple_per_second: float
    transcendental_per_second: float
    launch_seconds: float
    processor: Processor | None = None
    float32_flops: float = 0.0
    attention_flops: Rates = ()
    convolution_flops: Rates = ()
    reduction_bytes_per_second: float = 0.0
    gather_bytes_per_second: float = 0.0
    cache_bytes: int = 0
    cached_bytes_per_second: float = 0.0
    pointwise_per_second: tuple[tuple[str, float], ...] = ()
    extern_seconds: float = 0.0

    def flops_per_second(self, itemsize: int, kind: str = "matmul") -> float:
        """Rate for elements of this many bytes; wider ones run at half the rate for each doubling.

        kind: `matmul`, `attention` or `convolution`.
        """
        if kind == "matmul" and itemsize == 4 and self.float32_flops and not _allows_tf32():
            return self.float32_flops
        rates = dict(self.contraction_flops)
        rates |= dict({"attention": self.attention_flops, "convolution": self.convolution_flops}.get(kind, ()))
        return rates.get(itemsize, rates[4] * 4 / max(itemsize, 4))

    def results_per_second(self, operator: str, transcendental: bool) -> float:
        """Pointwise results per second of an operator (`tanh`) when memory does not bound it."""
        known = dict(self.pointwise_per_second).get(operator)
        return known or (self.transcendental_per_second if transcendental else self.simple_per_second)

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain data for JSON; `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Device:
        """The device of `as_dict`; a ValueError for what is none (missing, unknown or impossible figures)."""
        try:
            values = dict(data)
            if values.get("processor") is not None:
                values["processor"] = Processor(**values["processor"])
            for name in ("contraction_flops", "attention_flops", "convolution_flops", "pointwise_per_second"):
                values[name] = tuple((key, float(rate)) for key, rate in values.get(name, ()))
            device = cls(**values)
            positive = [device.bytes_per_second, device.simple_per_second, device.transcendental_per_second]
            positive += [rate for rates in (device.contraction_flops, device.pointwise_per_second) for _, rate in rates]
            if 4 not in dict(device.contraction_flops) or not all(math.isfinite(r) and r > 0 for r in positive):
                raise ValueError("a rate that is no rate")
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no figures of a device: {error}") from error
        return device


def _allows_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


# One core of a server CPU with AVX2 or AVX-512, in round figures. Pointwise rates are what one more operator adds to a
# kernel of Inductor's (EPYC with AVX2, one thread, 2**20 elements: a multiply 2.8e10, tanh 2.2e8, exp 7.0e8, erf 4.9e8,
# sigmoid 4.8e8, log 3.9e8, a division 9e9, a square root 4e9, random numbers 7e7 results a second).
CPU: Final = Device(
    "cpu", ((4, 7e10), (2, 7e10), (1, 7e10)), 1.2e10, 2.5e10, 5e8, 2e-6,
    pointwise_per_second=(
        ("tanh", 2.5e8), ("exp", 7e8), ("erf", 5e8), ("sigmoid", 5e8), ("log", 4e8), ("div", 9e9), ("sqrt", 4e9),
        ("rsqrt", 4e9), ("inductor_random", 7e7),
    ),
)  # fmt: skip

# From the vendors' data sheets (dense, no sparsity), taken at about three quarters. float32_flops: the vector units',
# two for each multiply-add; simple: one result for two of those. transcendental: 16 results a clock and multiprocessor.
# Not measured. The launch is what one costs in a stream of many.
_H100 = Device(
    "H100", ((4, 3.0e14), (2, 7.0e14), (1, 1.4e15)), 2.7e12, 2.5e13, 3.5e12, 2e-6,
    Processor(90, 132, 80 * 2**30, 50 * 2**20, 227 * 1024), 5.0e13,
)  # fmt: skip
_H200 = Device(
    "H200", ((4, 3.0e14), (2, 7.0e14), (1, 1.4e15)), 3.9e12, 2.5e13, 3.5e12, 2e-6,
    Processor(90, 132, 141 * 10**9, 50 * 2**20, 227 * 1024), 5.0e13,
)  # fmt: skip
_A100 = Device(
    "A100", ((4, 1.1e14), (2, 2.2e14), (1, 4.4e14)), 1.5e12, 7.5e12, 2.4e12, 3e-6,
    Processor(80, 108, 80 * 2**30, 40 * 2**20, 163 * 1024), 1.5e13,
)  # fmt: skip
_L4 = Device(
    "L4", ((4, 4e13), (2, 9e13), (1, 1.8e14)), 2.4e11, 1.2e13, 1.8e12, 3e-6,
    Processor(89, 58, 24 * 2**30, 48 * 2**20, 99 * 1024), 2.3e13,
)  # fmt: skip
_RTX4090 = Device(
    "RTX 4090", ((4, 6.2e13), (2, 1.2e14), (1, 2.5e14)), 7.6e11, 3.1e13, 3.8e12, 3e-6,
    Processor(89, 128, 24 * 2**30, 72 * 2**20, 99 * 1024), 6.2e13,
)  # fmt: skip
# TF32 stands for what its sheet calls so; Triton generates code for it by another compiler, so no processor.
_MI300X = Device("MI300X", ((4, 4.9e14), (2, 9.8e14), (1, 1.9e15)), 4.0e12, 6.1e13, 7.7e12, 3e-6, None, 1.2e14)
GPUS: Final = (_H200, _H100, _A100, _L4, _RTX4090, _MI300X)


_pretended: list[Device] = []


def named(name: str) -> Device:
    """The GPU of this name (`H200`, `RTX4090`) that code can be generated for; a ValueError that lists them."""
    targets = [gpu for gpu in GPUS if gpu.processor is not None]
    for gpu in targets:
        if _plain(gpu.name) == _plain(name):
            return gpu
    raise ValueError(f"target={name!r} is not known: one of {', '.join(gpu.name for gpu in targets)}")


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "")


def take_cuda_for(gpu: Device) -> None:
    """From now on CUDA tensors of this process have the figures of this GPU; for a process that pretends to have it."""
    _pretended.append(gpu)


def figures(device: torch.device) -> Device:
    """Figures for a torch device; an unknown GPU is taken for an A100, whose ratios are typical."""
    if device.type == "cuda" and _pretended:
        return _pretended[-1]
    if device.type == "cuda" and torch.cuda.is_available():
        full_name = torch.cuda.get_device_name(device)
        return next((gpu for gpu in GPUS if _plain(gpu.name) in _plain(full_name)), _A100)
    return _A100 if device.type not in ("cpu", "meta") else CPU
