"""Runs Triton kernels that Inductor generated for CUDA on CPU tensors, in Triton's interpreter.

Import this before triton and before anything that imports it. Four gaps of the interpreter are closed (seen with
triton 3.6): it has no libdevice; a scalar loaded as an array of one element is no loop bound under numpy 2.4; it
truncates float32 to bfloat16, where hardware rounds to nearest even; and its atomic operators read a broadcast mask as
if it lay in memory whole. The last two give wrong numbers without a word.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import contextlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from triton.runtime import interpreter

from remat.torch_internals_lowering import Lowered

# --- libdevice ---------------------------------------------------------------------------------------------------


def _by_torch(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda *arrays: function(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)).numpy()


# numpy has these under the same name, or the one given; the rest comes from torch.
_NUMPY = {name: name for name in ("sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan")}
_NUMPY |= {name: name for name in ("sinh", "cosh", "tanh", "floor", "ceil", "trunc", "rint", "fmod", "hypot", "isnan")}
_NUMPY |= {"isinf": "isinf", "fabs": "abs", "pow": "power", "nearbyint": "rint", "copysign": "copysign"}
_NUMPY |= {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "atan2": "arctan2"}
_TORCH = {"erf": torch.erf, "erfc": torch.erfc, "erfinv": torch.erfinv, "rsqrt": torch.rsqrt, "lgamma": torch.lgamma}


def _function(symbol: str) -> Callable[..., Any]:
    """What a libdevice symbol computes (`__nv_expf`: exp)."""
    name = symbol.removeprefix("__nv_")
    for known in (name, name.removesuffix("f"), name.removesuffix("d")):
        if known in _TORCH:
            return _by_torch(_TORCH[known])
        if known in _NUMPY:
            return getattr(np, _NUMPY[known])
    raise LookupError(f"the interpreter has no stand-in for libdevice's {symbol}")


def _extern_elementwise(self: Any, library: str, path: str, symbol: str, values: Any, kind: Any, pure: bool) -> Any:
    scalar = getattr(kind, "scalar", kind)
    with np.errstate(all="ignore"):
        found = _function(symbol)(*(value.data for value in values))
    return interpreter.TensorHandle(np.asarray(found).astype(interpreter._get_np_dtype(scalar)), scalar)


class _Libdevice(types.ModuleType):
    """Triton's own table of libdevice functions, called with the interpreter's semantics."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from triton.language.extra.cuda import libdevice

        function = getattr(libdevice, name)
        return lambda *values: function(*values, _semantic=interpreter.interpreter_semantic)


# --- the two that give wrong numbers -----------------------------------------------------------------------------

_convert_float = interpreter._convert_float
_atomic_rmw = interpreter.InterpreterBuilder.create_atomic_rmw


def _rounding(array: Any, source: Any, target: Any, mode: Any) -> Any:
    if source == tl.float32 and target == tl.bfloat16 and mode is None:
        rounded = torch.from_numpy(np.ascontiguousarray(array).view(np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)
    return _convert_float(array, source, target, mode)


def _contiguous_atomic(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
    whole = (interpreter.TensorHandle(np.ascontiguousarray(one.data), one.dtype) for one in (pointer, value, mask))
    return _atomic_rmw(self, operation, *whole, *rest)


_patch_lang_tensor = interpreter._patch_lang_tensor


def _with_loop_bounds(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def close_gaps() -> None:
    """Patch the interpreter; for a process that does nothing else."""
    interpreter.InterpreterBuilder.create_extern_elementwise = _extern_elementwise
    interpreter._patch_lang_tensor = _with_loop_bounds
    interpreter._convert_float = _rounding
    interpreter.InterpreterBuilder.create_atomic_rmw = _contiguous_atomic
    helpers: Any = triton_helpers
    helpers.libdevice = _Libdevice("libdevice")
    helpers.set_driver_to_gpu = lambda: None
    torch._C._cuda_getCurrentRawStream = lambda index: 0


# --- generated modules -------------------------------------------------------------------------------------------


def load(lowered: Lowered) -> Callable[[list[Any]], Any]:
    """The `call` of a module generated for CUDA: its kernels interpreted, its host side on CPU tensors.

    The text of the kernels is untouched.
    """
    kernels, waits, host = lowered.source.rpartition("async_compile.wait(globals())")
    for old, new in (
        ("empty_strided_cuda", "empty_strided_cpu"),
        ("torch.cuda._DeviceGuard", "_no_guard"),
        ("torch.cuda.set_device", "_no_device"),
        ("device(type='cuda', index=0)", "device(type='cpu')"),
    ):
        host = host.replace(old, new)
    space: dict[str, Any] = {"__name__": "generated", "__file__": "generated"}
    space |= {"_no_guard": lambda index: contextlib.nullcontext(), "_no_device": lambda index: None}
    exec(compile(kernels + waits + host, "generated", "exec"), space)
    space.update(lowered.constants)
    call: Callable[[list[Any]], Any] = space["call"]
    return call
