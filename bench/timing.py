"""Time as paired ratios in one run: A B B A ..., process CPU seconds, median and 95% bootstrap interval.

Machines drift by 10-20% within minutes; both halves of a pair see the same drift, so their ratio does not.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

RESAMPLES = 10_000
WARM_UP_CALLS = 2


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios of seconds and its 95% bootstrap interval."""

    median: float
    low: float
    high: float
    pairs: int


def use_one_thread() -> None:
    """One thread, for CPU time that adds up and for results that do not depend on the number of cores.

    Call it before compiling: Inductor writes the number of threads into its CPU kernels.
    """
    torch.set_num_threads(1)


def training_step(model: Callable[..., Tensor], args: tuple[Any, ...], parameters: Iterable[Tensor]) -> None:
    """One forward and backward with fresh gradients."""
    for parameter in parameters:
        parameter.grad = None
    model(*args).backward()


def seconds(call: Callable[[], object], device: str = "cpu") -> float:
    """CPU seconds of this process for `call()`; on a GPU, wall seconds until the GPU has finished."""
    if torch.device(device).type == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def paired_ratio(
    measured: Callable[[], object], peer: Callable[[], object], pairs: int, device: str = "cpu"
) -> Ratio:
    """Seconds of `measured()` over those of `peer()`, from `pairs` pairs in the order A B B A."""
    for _ in range(WARM_UP_CALLS):
        measured()
        peer()
    ratios = []
    for index in range(pairs):
        if index % 2:
            below = seconds(peer, device)
            above = seconds(measured, device)
        else:
            above = seconds(measured, device)
            below = seconds(peer, device)
        ratios.append(above / below)
    low, high = bootstrap_interval(ratios)
    return Ratio(float(np.median(ratios)), low, high, pairs)


def bootstrap_interval(samples: Iterable[float], seed: int = 0) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of the median of `samples`."""
    values = np.asarray(list(samples))
    drawn = np.random.default_rng(seed).choice(values, size=(RESAMPLES, values.size))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)
