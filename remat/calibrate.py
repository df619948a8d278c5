"""The figures of a device measured on it, once, to be kept for every later process (`python -m remat calibrate`).

Each figure is that of torch's own operators, called with `out=` so that no allocation is timed. A time is the least of
several: what else runs on the machine only ever adds to it. Where there are several shapes, the figure is their median.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from remat import devices, learned, measured, snapshot
from remat.devices import Device
from remat.learned import Learned
from remat.settings import Settings
from remat.snapshot import Machine, Snapshot
from remat.store import Document, open_store

# Called with what is measured next and the fraction that is done.
Progress = Callable[[str, float], None]

MIB: Final = 2**20
# Runs of a call: the least of five was within 3% of the least of twenty on two shared cores.
REPEATS: Final = 5
# A batch of short calls lasts about so long, some hundred times what reading the clock takes.
BATCH_SECONDS: Final = 1e-3
# A shape that would take longer is left out, so that a dtype without fast code (bfloat16 on a CPU without AVX512-BF16:
# 1.2 GFLOP/s, 1.8 s for the largest shape) costs no more than a fraction of a second; smaller shapes tell its rate.
SLOW_SECONDS: Final = 0.1
# Bytes read and written by what must not fit in a cache: 2 MiB of L2 and 32 MiB of L3 here; GPUs have up to 256 MiB.
LARGE_BYTES: Final = {"cpu": 64 * MIB, "cuda": 1024 * MIB}
# Bytes of what is in the cache for sure, and the sizes tried for how large that is.
CACHED_BYTES: Final = 256 * 1024
CACHE_SIZES: Final = tuple(2**exponent for exponent in range(17, 24))
# A size counts as in the cache while its bandwidth is at least this share of that at CACHED_BYTES. Measured here: 0.7
# to 1 up to 8 MiB, 0.25 at 64 MiB.
CACHED_SHARE: Final = 0.6
ROW: Final = 256
GRID_SECONDS: Final = 4.0
_POINTWISE: Final = ("tanh", "exp", "erf", "log", "sigmoid", "sin", "sqrt", "rsqrt")
_TRANSCENDENTAL: Final = ("tanh", "exp", "erf", "log")
# rows, inner, columns; smallest first. The last ones are what a figure is of, the small one tells whether they are run.
_MATRICES: Final = ((192, 192, 192), (2048, 256, 256), (512, 512, 512), (768, 768, 768), (256, 1024, 1024))
_GPU_MATRICES: Final = ((512, 512, 512), (8192, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192))
# Compiled with what Inductor's own kernel calls for each number; the loop around is as plain as Inductor's.
_RANDOM_SOURCE: Final = """
#include <ATen/core/PhiloxRNGEngine.h>
extern "C" void draw(float* out, long count, long seed, int threads) {
  #pragma omp parallel for num_threads(threads)
  for (long i = 0; i < count; i++) {
    out[i] = static_cast<float>(at::Philox4_32(seed, 0, i)() & 0x7FFFFFFF) * 4.6566127342e-10f;
  }
}
"""
COMPILER_SECONDS: Final = 4.0
# How much slower Inductor's own loop is around that call, which tests every element for where it lies: 0.12e9 numbers a
# second here, 0.06e9 to 0.08e9 in a compiled dropout.
RANDOM_OVERHEAD: Final = 1.7
# How much cheaper a plain operator is inside of a kernel than alone, where it is bound by loads and stores: on an EPYC
# with AVX2 twenty more multiplies and additions in one of Inductor's kernels ran at 2.8e10 results a second each, and
# alone, in the cache, at 4.4e9.
IN_KERNEL: Final = 6.0


@dataclass(frozen=True)
class Calibration:
    """What was measured, beside what is built in.

    snapshot: as later processes will load it for these settings. learned: what was fitted to the timings. path: where
    the figures were put. seconds: what all took. notes: what could not be measured, and why.
    """

    device: Device
    built_in: Device
    snapshot: Snapshot
    learned: Learned | None
    path: Path
    seconds: float
    notes: tuple[str, ...]


def calibrate(
    device: torch.device, settings: Settings, progress: Progress | None = None, refresh: bool = False
) -> Calibration:
    """Measure this device, keep the figures in the settings' store, and learn from all operators timed so far.

    refresh: forget those first. Took 7 s on one core of an AMD EPYC. Random states and torch's settings are left as
    they were. Raises ValueError for a device that is not here.
    """
    machine = snapshot.machine_of(device)
    if machine is None:
        raise ValueError(f"{device} cannot be measured here")
    report = progress or (lambda what, done: None)
    started = time.perf_counter()
    store, timings = open_store(settings.cache_dir), snapshot.timings_name(device, machine)
    if refresh:
        store.update(timings, lambda _: {})  # the next ones are a new generation
    with _left_as_it_was(device):
        figures, notes = _figures(device, machine, lambda what, done: report(what, 0.7 * done))
        grid = measured.time_grid(
            device, GRID_SECONDS, lambda done, count: report("operators to learn from", 0.7 + 0.3 * done / count)
        )
    samples = measured.add(store, timings, grid)
    fitted = learned.fit(list(samples.values()), figures)
    seconds = time.perf_counter() - started

    def change(_: Document | None) -> Document:
        return {
            **dataclasses.asdict(machine),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 2),
            "notes": list(notes),
            "figures": figures.as_dict(),
            "learned": None if fitted is None else fitted.to_dict(),
        }

    store.update(machine.calibration_name, change)
    report("done", 1.0)
    return Calibration(
        figures, devices.figures(device), snapshot.load(device, settings), fitted,
        store.path(machine.calibration_name), seconds, notes,
    )  # fmt: skip


@contextlib.contextmanager
def _left_as_it_was(device: torch.device) -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    given = [] if device.index is None else [device.index]
    indices = (given or [torch.cuda.current_device()]) if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=indices), torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)


def _figures(device: torch.device, machine: Machine, report: Progress) -> tuple[Device, tuple[str, ...]]:
    """All figures, and notes about those that stay as built in."""
    bench = _Bench(device)
    parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("matrix products", bench.contractions),
        ("attention", bench.attention),
        ("convolutions", bench.convolutions),
        ("bandwidth", bench.bandwidth),
        ("cache", bench.cache),
        ("pointwise operators", bench.pointwise),
        ("calls", bench.calls),
    ]
    values: dict[str, Any] = {}
    for position, (what, measure) in enumerate(parts):
        report(what, position / len(parts))
        values |= measure()
    return dataclasses.replace(devices.figures(device), name=machine.device, **values), tuple(bench.notes)


class _Bench:
    """Measures one device; `notes` collects what it could not."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_gpu = device, device.type == "cuda"
        self.built_in = devices.figures(device)
        self.large = LARGE_BYTES[device.type]
        self.notes: list[str] = []
        self.generator = torch.Generator().manual_seed(0)

    def seconds(self, call: Callable[[], Any]) -> float:
        """The least time of a call, over `REPEATS` batches; on a GPU of the calls back to back in its stream."""
        call()
        first = max(self._batch(call, 1), 1e-7)
        count = max(1, min(1000, math.ceil(BATCH_SECONDS / first)))
        repeats = REPEATS if first < SLOW_SECONDS else 1
        return min(first, *(self._batch(call, count) / count for _ in range(repeats)))

    def _batch(self, call: Callable[[], Any], count: int) -> float:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        for _ in range(count):
            call()
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started

    def numbers(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers in [0.5, 1.5): no operator has a special case there. Drawn from a generator of its own."""
        count = math.prod(shape)
        drawn = torch.rand(min(count, MIB), generator=self.generator) + 0.5
        drawn = drawn.to(self.device, dtype)
        return drawn.repeat(math.ceil(count / MIB))[:count].view(shape)

    def _rate(self, work: Sequence[tuple[int, Callable[[], Any]]]) -> float:
        """The median rate of calls with their FLOPs, least work first; those that would take long are left out."""
        rates: list[float] = []
        for flops, call in work:
            if rates and flops / rates[-1] > SLOW_SECONDS:
                break
            rates.append(flops / self.seconds(call))
        return statistics.median(rates[1:] or rates)

    def _by_width(self, rate: Callable[[torch.dtype], float], what: str) -> tuple[tuple[int, float], ...]:
        """The rate by bytes of an element: of two bytes the faster of bfloat16 and float16, as one would choose."""
        halves = []
        for dtype in (torch.bfloat16, torch.float16):
            try:
                halves.append(rate(dtype))
            except RuntimeError as error:  # torch has no code for it here
                self.notes.append(f"{what} of {dtype}: {error}")
        found = [(4, rate(torch.float32))]
        return (*found, (2, max(halves))) if halves else tuple(found)

    def contractions(self) -> dict[str, Any]:
        """Matrix products; those of one byte are not run, they stay as much faster than two bytes as built in."""
        shapes = _GPU_MATRICES if self.is_gpu else _MATRICES

        def rate(dtype: torch.dtype) -> float:
            work = []
            for rows, inner, columns in shapes:
                first, second = self.numbers(rows, inner, dtype=dtype), self.numbers(inner, columns, dtype=dtype)
                out = torch.empty(rows, columns, dtype=dtype, device=self.device)
                work.append((2 * rows * inner * columns, lambda a=first, b=second, o=out: torch.mm(a, b, out=o)))
            return self._rate(work)

        if not self.is_gpu:
            rates = self._by_width(rate, "matrix product")
            return {"contraction_flops": self._with_bytes(rates)}
        torch.set_float32_matmul_precision("highest")
        exact = rate(torch.float32)
        torch.set_float32_matmul_precision("high")
        return {
            "contraction_flops": self._with_bytes(self._by_width(rate, "matrix product")),
            "float32_flops": exact,
        }

    def _with_bytes(self, rates: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        known, before = dict(rates), dict(self.built_in.contraction_flops)
        wider = known.get(2, known[4])
        return (*rates, (1, wider * before.get(1, before[4]) / before.get(2, before[4])))

    def attention(self) -> dict[str, Any]:
        """The forward of attention: two products of rows by rows by depth for each head."""
        shapes = ((2, 4, 128, 64), (4, 8, 256, 64), (1, 8, 512, 64))
        shapes = ((4, 16, 512, 64), (4, 16, 2048, 64), (8, 32, 2048, 128)) if self.is_gpu else shapes

        def rate(dtype: torch.dtype) -> float:
            work = []
            for batch, heads, rows, depth in shapes:
                value = self.numbers(batch, heads, rows, depth, dtype=dtype)
                flops = 4 * batch * heads * rows * rows * depth
                work.append((flops, lambda v=value: F.scaled_dot_product_attention(v, v, v)))
            return self._rate(work)

        return {"attention_flops": self._by_width(rate, "attention")}

    def convolutions(self) -> dict[str, Any]:
        """3x3 convolutions as in the stages of a ResNet."""
        shapes = ((8, 64, 28), (64, 64, 56), (64, 256, 14)) if self.is_gpu else ((1, 64, 14), (4, 64, 28), (4, 128, 14))

        def rate(dtype: torch.dtype) -> float:
            work = []
            for batch, channels, size in shapes:
                image = self.numbers(batch, channels, size, size, dtype=dtype)
                weight = self.numbers(channels, channels, 3, 3, dtype=dtype)
                flops = 2 * batch * channels * channels * 9 * size * size
                work.append((flops, lambda i=image, w=weight: F.conv2d(i, w, padding=1)))
            return self._rate(work)

        return {"convolution_flops": self._by_width(rate, "convolution")}

    def _copied(self, count_bytes: int) -> float:
        """Bytes a second of a copy that reads and writes so many in all."""
        source = self.numbers(count_bytes // 8)
        target = torch.empty_like(source)
        return count_bytes / self.seconds(lambda: target.copy_(source))

    def bandwidth(self) -> dict[str, Any]:
        """Copies, sums over rows and gathered rows, all larger than any cache."""
        count = self.large // 4
        value = self.numbers(count // 1024, 1024)
        sums = torch.empty(count // 1024, device=self.device)
        summed = value.nbytes / self.seconds(lambda: torch.sum(value, -1, out=sums))
        table = value.view(-1, ROW)
        indices = torch.randint(len(table), (len(table) // 2,), generator=self.generator).to(self.device)
        rows = torch.empty(len(indices), ROW, device=self.device)
        taken = 2 * rows.nbytes / self.seconds(lambda: torch.index_select(table, 0, indices, out=rows))
        return {
            "bytes_per_second": self._copied(self.large),
            "reduction_bytes_per_second": summed,
            "gather_bytes_per_second": taken,
        }

    def cache(self) -> dict[str, Any]:
        """Bandwidth in the cache, and up to which size it holds."""
        if self.is_gpu:
            self.notes.append("cache of a GPU: a copy that fits takes no longer than its launch; one bandwidth for all")
            return {"cache_bytes": 0, "cached_bytes_per_second": 0.0}
        cached = self._copied(CACHED_BYTES)
        holds = 0
        for size in CACHE_SIZES:
            if self._copied(size) < CACHED_SHARE * cached and size > CACHED_BYTES:
                break
            holds = size
        return {"cache_bytes": holds, "cached_bytes_per_second": cached}

    def pointwise(self) -> dict[str, Any]:
        """Results a second of operators whose operands lie in the cache."""
        if self.is_gpu:
            self.notes.append("pointwise operators of a GPU: alone they are bound by memory; rates as built in")
            return {}
        value, other = self.numbers(CACHED_BYTES // 16), self.numbers(CACHED_BYTES // 16)
        out = torch.empty_like(value)

        def rate(operator: Callable[..., Any], *arguments: Any) -> float:
            return value.numel() / self.seconds(lambda: operator(*arguments, out=out))

        rates = {name: rate(getattr(torch, name), value) for name in _POINTWISE}
        rates |= {"div": rate(torch.div, value, other), "pow": rate(torch.pow, value, 1.7)}
        simple = IN_KERNEL * statistics.median([rate(torch.add, value, other), rate(torch.mul, value, other)])
        drawn = self._drawn()
        if drawn is not None:
            rates["inductor_random"] = drawn
        return {
            "simple_per_second": simple,
            "transcendental_per_second": statistics.median(rates[name] for name in _TRANSCENDENTAL),
            "pointwise_per_second": tuple(sorted(rates.items())),
        }

    def _drawn(self) -> float | None:
        """Random numbers a second as Inductor's C++ draws them; None, with a note, where that cannot be compiled.

        Compiled by itself: through Inductor it takes 15 s where its headers were never compiled.
        """
        compiler = shutil.which(os.environ.get("CXX", "g++"))
        if compiler is None:
            self.notes.append("inductor_random: there is no C++ compiler")
            return None
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            source, library = Path(folder, "draw.cpp"), Path(folder, "draw.so")
            source.write_text(_RANDOM_SOURCE)
            headers = Path(torch.__file__).parent / "include"
            flags = ["-O3", "-ffast-math", "-std=c++17", "-fopenmp", "-shared", "-fPIC", f"-I{headers}"]
            command = [compiler, *flags, str(source), "-o", str(library)]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILER_SECONDS)
                draw = ctypes.CDLL(str(library)).draw
            except (OSError, subprocess.SubprocessError) as error:
                self.notes.append(f"inductor_random: {type(error).__name__}: {error}")
                return None
            draw.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_int]
            out, threads = torch.empty(CACHED_BYTES // 4), torch.get_num_threads()
            alone = out.numel() / self.seconds(lambda: draw(out.data_ptr(), out.numel(), 7, threads))
            return alone / RANDOM_OVERHEAD

    def calls(self) -> dict[str, Any]:
        """What calling takes: an operator on one number for a kernel, the smallest matrix product for one outside.

        Inductor's wrapper calls a kernel about as directly; a compiled function of one kernel would time its guards.
        """
        one, out = self.numbers(1), torch.empty(1, device=self.device)
        small, product = self.numbers(4, 4), torch.empty(4, 4, device=self.device)
        return {
            "launch_seconds": self.seconds(lambda: torch.add(one, one, out=out)),
            "extern_seconds": self.seconds(lambda: torch.mm(small, small, out=product)),
        }
