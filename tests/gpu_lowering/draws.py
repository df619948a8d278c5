"""Random numbers as Inductor's Triton kernels draw them (Philox), in the interpreter: part of the truth."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _rand(seed, result, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    drawn = tl.rand(tl.load(seed), offsets.to(tl.uint32))
    tl.store(result + offsets, drawn, offsets < count)


def random(
    size: Sequence[int], seed: torch.Tensor, mode: str, *, align_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`prims.inductor_random` as a CUDA kernel computes it."""
    assert mode == "rand"
    result = torch.empty(size, dtype=torch.float32)
    count = result.numel()
    _rand[(triton.cdiv(count, BLOCK),)](seed.reshape(1), result, count, BLOCK=BLOCK)
    return result


def seeds(count: int, device: torch.device) -> torch.Tensor:
    """`prims.inductor_seeds` as generated code draws them: over all of int64, where the operator draws from 0 on."""
    result = torch.empty(count, dtype=torch.int64, device=device)
    return torch.ops.aten.randint.low_out(-(2**63), 2**63 - 1, [count], out=result)
