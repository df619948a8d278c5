"""Pretending inside Inductor that a GPU is there, on a machine without one. Never in a user's process.

Lowering asks the device for its properties (how many multiprocessors, how much shared memory, which architecture) and
Triton for its target; nothing is launched. `pretend` answers these questions for the rest of the process.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo import device_interface
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _triton

from remat.devices import Processor

# Slots of c10's table of device guards (c10/core/DeviceType.h); the table has this many.
_GUARDS, _CUDA, _META = 22, 1, 14


@dataclass(frozen=True)
class _Properties:
    """What `torch.cuda.get_device_properties` would say."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block: int = 48 * 1024
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    gcnArchName: str = ""
    uuid: str = "pretended"


def pretend(name: str, processor: Processor) -> None:
    """From now on, Inductor and Triton in this process take `cuda:0` for this GPU. Needs the package triton.

    Raises RuntimeError in a process with a GPU, whose real one must not be lied about.
    """
    if torch.cuda.is_available():
        raise RuntimeError("this process has a GPU: lower for it as it is")
    properties = _Properties(
        name,
        *divmod(processor.architecture, 10),
        multi_processor_count=processor.multiprocessors,
        total_memory=processor.memory_bytes,
        L2_cache_size=processor.l2_bytes,
        shared_memory_per_block_optin=processor.shared_bytes,
        shared_memory_per_multiprocessor=processor.shared_bytes + 1024,
    )
    if not torch.cuda._is_compiled():
        _give_cuda_a_guard()
    _answer_for(properties)
    _convolve_as_cudnn()
    _target_triton(processor.architecture)
    for answered in vars(_triton).values():
        if hasattr(answered, "cache_clear"):
            answered.cache_clear()
    inductor_config.compile_threads = 1
    inductor_config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False


def _give_cuda_a_guard() -> None:
    """Let operators on fake CUDA tensors enter their device: a CPU build has no guard for it, the meta device's does
    nothing. Without one they fail with "not linked with support for cuda devices"."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _GUARDS).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[_CUDA]:
        guards[_CUDA] = guards[_META]


def _answer_for(properties: _Properties) -> None:
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_compute_capability": lambda device=None: 10 * properties.major + properties.minor,
        "synchronize": lambda device=None: None,
        "get_raw_stream": lambda index: 0,
        "exchange_device": lambda index: 0,
        "maybe_exchange_device": lambda index: 0,
        "is_bf16_supported": lambda including_emulation=False: True,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
    }
    for name, answer in answers.items():
        setattr(device_interface.CudaInterface, name, staticmethod(answer))
    worker: Any = device_interface.CudaInterface.Worker
    worker.get_device_properties = staticmethod(answers["get_device_properties"])
    cuda: Any = torch.cuda
    cuda.get_device_properties = answers["get_device_properties"]
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    cuda.current_device = answers["current_device"]
    cuda.get_device_name = lambda device=None: properties.name


def _convolve_as_cudnn() -> None:
    """Let fake convolutions lay out their results as cuDNN does: channels last if an argument is.

    A CPU build would choose its slow kernels, whose results are contiguous and would be copied.
    """
    binding: Any = torch._C
    choose, format_of = binding._select_conv_backend, binding._conv_determine_backend_memory_format

    def select(input: Any, *arguments: Any, **keywords: Any) -> Any:
        return binding._ConvBackend.Cudnn if input.device.type == "cuda" else choose(input, *arguments, **keywords)

    def memory_format(input: Any, weight: Any, backend: Any) -> torch.memory_format:
        if backend != binding._ConvBackend.Cudnn:
            return format_of(input, weight, backend)
        found = [torch._prims_common.suggest_memory_format(tensor) for tensor in (input, weight)]
        return next((one for one in found if one != torch.contiguous_format), torch.contiguous_format)

    binding._select_conv_backend, binding._conv_determine_backend_memory_format = select, memory_format


def _target_triton(architecture: int) -> None:
    """A driver that knows its target and nothing else: enough to generate and compile kernels."""
    import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped,import-not-found,unused-ignore]

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", architecture, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: Any = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda:0")

        def get_device_interface(self) -> Any:
            return torch.cuda

        @staticmethod
        def is_active() -> bool:
            return True

    triton.runtime.driver.set_active(Driver())


def run_on_fakes(node: fx.Node) -> Any:
    """What an operator returns for the fake tensors of its arguments."""
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    leaves = torch.utils._pytree.tree_leaves((arguments, node.meta.get("val")))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    positional, keywords = arguments
    with mode or contextlib.nullcontext(), torch.no_grad():
        return node.target(*positional, **keywords)  # type: ignore[operator]


def moved(value: Any, device: torch.device) -> Any:
    """A fake tensor like this one on another device."""
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode, torch.no_grad():
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, like, device)


# --- kernels to machine code -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """One kernel of a generated module, compiled: its configurations, the target and shared memory of the largest."""

    name: str
    configurations: int
    target: str
    shared_bytes: int
    is_machine_code: bool


def compile_kernels(source: str) -> list[Compiled]:
    """Compile the Triton kernels of a generated module for the GPU that is pretended, none loaded."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers

    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):
        if hasattr(inductor_config, name):
            setattr(inductor_config, name, False)
    helpers: Any = triton_helpers
    helpers.set_driver_to_gpu = lambda: None
    found = []
    for name, text in _kernel_texts(source):
        tuner = getattr(PyCodeCache.load(text), name)
        tuner.precompile(warm_cache_only=True)
        kernels = [result.kernel for result in tuner.compile_results]
        targets = {f"sm_{kernel.metadata.target.arch}" for kernel in kernels}
        machine_code = all(kernel.asm["cubin"][:4] == b"\x7fELF" for kernel in kernels)
        shared = max(kernel.metadata.shared for kernel in kernels)
        found.append(Compiled(name, len(kernels), " ".join(sorted(targets)), shared, machine_code))
    return found


def _kernel_texts(source: str) -> list[tuple[str, str]]:
    """The name and text of each `async_compile.triton(name, text)`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "triton":
            name, text = (argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant))
            found.append((str(name), str(text)))
    return found
