"""Private names of torch that lowering a graph without building it needs; the rest are in `torch_internals`.

Inductor is run as always up to the point where it would compile and load what it wrote; here it stops, and the text,
its scheduler's figures and the strides of the results are taken.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from remat.torch_internals import random_numbers_by_element

__all__ = ["FakeTensorMode", "TorchDispatchMode"]


@dataclass(frozen=True)
class Kernel:
    """One generated kernel, what Inductor fused.

    read_bytes, written_bytes: Inductor's count of its traffic, each buffer once. nodes: names of the FX nodes computed
    in it. writes: the buffers that it writes.
    """

    name: str
    is_reduction: bool
    read_bytes: int
    written_bytes: int
    nodes: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Lowered:
    """What Inductor wrote for one graph.

    source: the module's text. kernels: in the order they run. origins: by buffer, the FX nodes it holds results of; an
    input's is itself.
    strides: of each tensor among the results, None for others. constants: tensors that the module reads by name.
    seconds: what lowering took.
    """

    source: str
    kernels: tuple[Kernel, ...]
    origins: Mapping[str, tuple[str, ...]]
    strides: tuple[tuple[int, ...] | None, ...]
    constants: Mapping[str, torch.Tensor]
    seconds: float


def lower(
    module: fx.GraphModule, is_backward: bool, visible: range, donated: Sequence[int], patches: Mapping[str, Any]
) -> Lowered:
    """Lower a forward or backward graph for the device that its fake tensors are on; nothing is built.

    visible: the results, by position, that the user sees, whose strides Inductor keeps. donated: the inputs, by
    position, whose memory the code may write over. No compilation of another thread runs meanwhile.
    """
    # Imported late: Inductor takes a second, and a process that only plans does not need it.
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import BoxedBool

    started = time.perf_counter()
    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    fake_mode = torch._guards.detect_fake_mode(examples)
    results = _results(module)
    seen = [number for number in visible if isinstance(results[number], fx.Node)]
    module.graph.output_node().meta["user_visible_output_idxs"] = seen
    context = torch._guards.TracingContext(fake_mode)
    context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=list(donated))  # type: ignore[assignment]
    taken: list[Lowered] = []

    def stop(graph: Any) -> Any:
        code, _ = graph.codegen()
        text = code if isinstance(code, str) else code.value
        taken.append(_taken(graph, text, time.perf_counter() - started))
        loaded: Any = types.ModuleType("not_loaded")
        loaded.call, loaded.runner, loaded.__file__ = _refuse, None, "not loaded"
        return loaded

    with (
        compile_lock,
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        random_numbers_by_element(),
        inductor_config.patch({**patches, "fx_graph_cache": False}),
        functorch_config.patch(enable_autograd_cache=False),
        torch._guards.tracing(context),
    ):
        compile_fx.compile_fx_inner(
            module, examples, is_backward=is_backward, static_input_idxs=(), cudagraphs=BoxedBool(False)
        )
    return taken[0] if taken else _without_calls(module, time.perf_counter() - started)


def why_not_lowered() -> str | None:
    """Why graphs cannot be lowered for a dry run under Inductor's settings in force; None where they can."""
    if inductor_config.cpp_wrapper:
        return "cpp_wrapper writes no Python that could be run on its own"
    if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
        return "max_autotune builds kernels and times them when a graph is lowered"
    return None


def _without_calls(module: fx.GraphModule, seconds: float) -> Lowered:
    """A graph that calls nothing, for which Inductor writes nothing: its results are inputs and constants."""
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    constants = {node.name: getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")}
    results = _results(module)
    names = [result.name if isinstance(result, fx.Node) else repr(result) for result in results]
    text = f"def call(args):\n    [{', '.join(inputs)}] = args\n    args.clear()\n    return [{', '.join(names)}]\n"
    values = [_value(result) for result in results]
    strides = tuple(
        tuple(map(int, value.stride())) if isinstance(value, torch.Tensor) and not _is_symbolic(value) else None
        for value in values
    )
    return Lowered(text, (), {name: (name,) for name in inputs}, strides, constants, seconds)


def _is_symbolic(value: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))


def donated_inputs(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int, num_sizes: int
) -> list[int]:
    """The inputs of the backward, by position, whose memory nobody else holds: AOTAutograd gives it away."""
    if not functorch_config.donated_buffer:
        return []
    inputs = [node.meta.get("val") for node in forward.graph.find_nodes(op="placeholder")]
    results, gradients = ([_value(node) for node in _results(module)] for module in (forward, backward))
    outputs, saved = results[:num_fwd_outputs], results[num_fwd_outputs : len(results) - num_sizes]
    found = graph_compile.collect_fw_donated_buffer_idxs(inputs, outputs, gradients, saved)
    return [number + num_sizes for number in found]


def _results(module: fx.GraphModule) -> list[Any]:
    results: Any = module.graph.output_node().args[0]
    return list(results)


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _refuse(arguments: Any) -> Any:
    raise RuntimeError("this graph was lowered only: there is no code to call")


def _taken(graph: Any, text: str, seconds: float) -> Lowered:
    from torch._inductor.scheduler import NopKernelSchedulerNode

    kernels = tuple(
        _kernel(node)
        for node in graph.scheduler.nodes
        if not isinstance(node, NopKernelSchedulerNode) and not node.is_extern()
    )
    origins = {name: (name,) for name in graph.graph_input_names}
    origins |= {buffer.get_name(): _names(getattr(buffer, "origins", ())) for buffer in graph.buffers}
    strides = tuple(
        tuple(map(_integer, output.get_stride())) if _is_tensor(output) else None for output in graph.graph_outputs
    )
    return Lowered(text, kernels, origins, strides, dict(graph.constants), seconds)


def _is_tensor(output: Any) -> bool:
    from torch._inductor import ir

    return isinstance(output, ir.IRNode) and hasattr(output, "get_stride") and output.maybe_get_layout() is not None


def _integer(size: Any) -> int:
    sizes: Any = torch._inductor.virtualized.V.graph.sizevars
    hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint
    return int(hint(size))


def _kernel(node: Any) -> Kernel:
    parts = node.get_nodes()
    nodes = [fx_node for part in parts if part.node is not None for fx_node in part.node.get_origins()]
    return Kernel(
        name=node.get_name(),
        is_reduction=node.is_reduction(),
        read_bytes=node.get_read_write_buffers_sizes_impl(include_reads=True, include_writes=False),
        written_bytes=node.get_read_write_buffers_sizes_impl(include_reads=False, include_writes=True),
        nodes=_names(nodes),
        writes=tuple(sorted(node.get_buffer_names())),
    )


def _names(nodes: Any) -> tuple[str, ...]:
    return tuple(sorted({node.name for node in nodes}))


# --- running the host side of what was written -------------------------------------------------------------------


@contextlib.contextmanager
def kernels_not_built(stub: Callable[[], Any]) -> Iterator[None]:
    """While a generated module is executed, each kernel in it becomes `stub()`."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor.async_compile import AsyncCompile

    makers = ("triton", "cpp_pybinding", "cpp")
    with compile_lock, contextlib.ExitStack() as stack:
        for name in makers:
            stack.enter_context(mock.patch.object(AsyncCompile, name, lambda self, *_, **__: stub()))
        stack.enter_context(mock.patch.object(AsyncCompile, "wait", lambda self, scope: None))
        # A CPU build has no such function, and generated code imports it.
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True))
        yield


def fake_results(operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], device: torch.device) -> Any:
    """What an operator returns for meta tensors taken as tensors of a device: sizes and strides are that device's."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        return FakeTensor(mode, value, device) if isinstance(value, torch.Tensor) else value

    arguments, keywords = torch.utils._pytree.tree_map(fake, (tuple(arguments), dict(keywords)))
    with mode:
        return operator(*arguments, **keywords)


# --- graphs as bytes ---------------------------------------------------------------------------------------------

# What planning and lowering read of a node's meta data, and a pickle can hold.
_KEPT_META = frozenset({"val", "stack_trace", "original_aten", "from_node", "desc", "unbacked_bindings"})
_KEPT_META |= {"recompute", "ac_graph_id", "partitioner_tag"}


def pack_graph(module: fx.GraphModule) -> bytes:
    """A graph of fake tensors as bytes for another process of the same torch."""
    from torch.fx._graph_pickler import GraphPickler, Options

    options = Options(ops_filter=None, node_metadata_key_filter=_KEPT_META.__contains__)
    return GraphPickler.dumps(module, options)


def unpack_graph(data: bytes) -> fx.GraphModule:
    """The graph again, in a fake mode of its own."""
    from torch.fx._graph_pickler import GraphPickler

    module: Any = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    return module
