"""`budget="auto"`: as many bytes as the device has free when a graph is compiled, less what training takes besides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from remat.errors import SettingError

# Kept free of what is free: memory in pieces too small to use, libraries' workspaces, what the program does besides. A
# judgement; PyTorch's own allocator calls a segment of which 20% is unused worth splitting.
MARGIN: Final = 0.1
# An optimizer allocates its state after the first backward, when graphs are compiled already: Adam two moments for each
# trainable parameter. Without room for them a budget would hold for one step.
OPTIMIZER_MOMENTS: Final = 2
# What is left is rounded down to a multiple of this share of the power of two below it. Free memory differs from run to
# run, and each other budget would be another plan and another entry of the compile cache.
ROUNDED_TO: Final = 1 / 16

_CGROUP: Final = Path("/sys/fs/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")


def budget_bytes(device: torch.device, example_inputs: Sequence[Any]) -> int:
    """What `budget="auto"` stands for, in bytes; where `torch.distributed` runs, what rank 0 finds, on every rank.

    Every rank has to compile the same graphs then. Raises SettingError where nothing is left or the system does not
    tell.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return _or_error(_left_bytes(device, example_inputs), device)
    found = [_left_bytes(device, example_inputs) if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(found, src=0)
    return _or_error(found[0], device)


def _or_error(found: int | None, device: torch.device) -> int:
    """Raised on all ranks alike, or the others would wait for the one that stopped."""
    if found is None:
        raise SettingError(f"budget='auto': this system does not tell how much memory {device} has free; give bytes")
    if found < 1:
        raise SettingError(f"budget='auto': {device} has no memory free beyond what an optimizer will take; give bytes")
    return found


def _left_bytes(device: torch.device, example_inputs: Sequence[Any]) -> int | None:
    free = free_bytes(device)
    if free is None:
        return None
    trainable = [v for v in example_inputs if isinstance(v, torch.Tensor) and v.requires_grad and v.is_leaf]
    moments = OPTIMIZER_MOMENTS * sum(value.numel() * value.element_size() for value in trainable)
    return rounded(int((1 - MARGIN) * free) - moments)


def rounded(count: int) -> int:
    """Down to four binary digits after the first; 0 for what is below 0."""
    if count < 1:
        return 0
    step = max(1, int(2 ** math.floor(math.log2(count)) * ROUNDED_TO))
    return count // step * step


def free_bytes(device: torch.device) -> int | None:
    """What can be allocated: on a GPU free memory and what its allocator holds unused; None if the system is silent."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    if device.type != "cpu" or not _MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    machine = int(lines["MemAvailable"].split()[0]) * 2**10
    group = _left_in_group()
    return machine if group is None else min(machine, group)


def _left_in_group() -> int | None:
    """Of a container's limit what is left, file pages that can be dropped counted as free; None without a limit."""
    limit = _CGROUP / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return None
    used = int((_CGROUP / "memory.current").read_text())
    stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return int(limit.read_text()) - used + int(stat.get("inactive_file", 0))
