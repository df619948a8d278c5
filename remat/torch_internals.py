"""Every private name of torch that remat uses, and nothing else: a new torch release is this one file to read.

Those that only lowering needs are in `torch_internals_lowering` and `torch_internals_gpu` beside it. The tests run with
torch 2.13; the dry run and the kernels of one model were run with 2.11 and 2.14 too. Signatures that may differ in
another release are told apart by inspection, not by version number.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch._aot_autograd.utils import (
    _is_bwd_seed_offset,
    _is_fwd_seed_offset,
    _is_primal,
    _is_tangent,
)
from torch._inductor import config as inductor_config
from torch._inductor import inductor_prims as _inductor_prims  # noqa: F401  defines prims.inductor_*
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.virtualized import V
from torch._library.custom_ops import CustomOpDef
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "BackwardState",
    "CheckpointPolicy",
    "CustomPartitionerFn",
    "V",
    "cache_dir",
    "is_backward_seed",
    "is_forward_seed",
    "is_primal",
    "is_sym_node",
    "is_tangent",
]

is_primal: Callable[[fx.Node], bool] = _is_primal
is_tangent: Callable[[fx.Node], bool] = _is_tangent
is_forward_seed: Callable[[fx.Node], bool] = _is_fwd_seed_offset
is_backward_seed: Callable[[fx.Node], bool] = _is_bwd_seed_offset
must_be_in_forward: Callable[[fx.Node], bool] = partitioners._must_be_in_forward
must_be_in_backward: Callable[[fx.Node], bool] = partitioners._must_be_in_backward

# Operators that draw nothing themselves: they compute random numbers from a seed that is an argument.
LOOKUP_SEED = torch.ops.prims.inductor_lookup_seed.default
RANDOM = torch.ops.prims.inductor_random.default
SEEDED_OPERATORS: tuple[Any, ...] = (
    LOOKUP_SEED,
    RANDOM,
    torch.ops.prims.inductor_randint.default,
)


# --- the backend's surroundings -----------------------------------------------------------------------------


def register_backend(compiler: Callable[..., Any], name: str) -> None:
    """Make `torch.compile(backend=name)` work where the package is not installed (a plain checkout).

    An installed package is found by its entry point, and torch refuses a second registration of the name.
    """
    from importlib.metadata import entry_points

    from torch._dynamo.backends import registry

    if name not in registry._COMPILER_FNS and name not in entry_points(group="torch_dynamo_backends").names:
        registry.register_backend(compiler_fn=compiler, name=name)


def inductor_options() -> frozenset[str]:
    """The names that Inductor's own `options=` knows."""
    return frozenset(inductor_config.get_config_copy())


def inductor_patches(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `torch.compile(mode=..., options=...)` would set in Inductor's config, with torch's own checks."""
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), None)
    return dict(wrapper.config)


def known_modes() -> tuple[str, ...]:
    """The names that `mode=` accepts."""
    return ("default", *list_mode_options())


@contextlib.contextmanager
def without_compile_caches() -> Iterator[None]:
    """Compile anew: neither AOTAutograd's nor Inductor's graph cache is read or written.

    Inductor's kernels on disk are still shared; forcing those anew rebuilds the precompiled header (2-4x).
    """
    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(fx_graph_cache=False):
        yield


def compile_with_inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: dict[str, Any],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Any:
    """Run Inductor's pipeline on a Dynamo graph, its inner compiler wrapped by `wrap`."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    return compile_fx(module, example_inputs, inner_compile=wrap(compile_fx_inner), config_patches=patches)


def backward_compiled_at_once() -> contextlib.AbstractContextManager[Any]:
    """Compile a backward with its forward, not in the midst of its first run.

    While Dynamo compiles, torch does not allow that ("Metric(s) {'is_forward'} have already been set").
    """
    return functorch_config.patch(force_non_lazy_backward_lowering=True)


@contextlib.contextmanager
def random_numbers_by_element() -> Iterator[None]:
    """Let Triton kernels draw each number from the seed and its element's place, whatever kernel draws it.

    Since 2.13 pointwise kernels draw four at a time and other kernels do not, so that a mask which the forward drew in
    a reduction and the backward draws again in a pointwise kernel is another one, and the gradients are wrong without a
    word (pytorch #198333; the attention's gradients of BERT at its smallest plan were off by 0.3 to 0.8).
    """
    try:
        from torch._inductor.codegen.triton import TritonOverrides
    except ImportError:  # no Triton: nothing draws with it
        yield
        return
    if hasattr(TritonOverrides, "_can_use_4x_random"):
        with mock.patch.object(TritonOverrides, "_can_use_4x_random", staticmethod(lambda: False)):
            yield
    else:
        yield


def compile_joint_graph(
    compile_graph: Callable[..., Any], module: fx.GraphModule, patches: dict[str, Any]
) -> Callable[[list[Any]], Any]:
    """Compile a joint graph whole, outside the pipeline that made it, under the settings of the backend's call."""
    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    fake_mode = torch._guards.detect_fake_mode(examples)
    output = module.graph.output_node()
    output.meta.setdefault("user_visible_output_idxs", list(range(len(output.all_input_nodes))))
    with (
        inductor_config.patch(patches),
        V.set_fake_mode(fake_mode),
        torch._guards.tracing(torch._guards.TracingContext(fake_mode)),
    ):
        return compile_graph(module, examples, static_input_idxs=(), is_inference=True)


def current_grad_and_autocast() -> str:
    """The global state that changes what AOTAutograd traces, as text for a graph's hash."""
    state: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    state += [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    return repr(state)



# --- running an operator while a graph is compiled ----------------------------------------------------------


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Leave the fake mode of a compilation, so that tensors made meanwhile are real."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with unset_fake_temporarily(), _disable_current_modes():
        yield


def overload_of(operator: Any) -> Any:
    """What a graph calls for an operator made by `torch.library.custom_op`; None for anything else."""
    return operator._opoverload if isinstance(operator, CustomOpDef) else None


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made meanwhile have sizes and a device, and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


def runs_as_torch_has_it(target: Any) -> bool:
    """Whether Inductor calls this operator, since it has no lowering for it or one that always falls back."""
    from torch._inductor import lowering

    found = lowering.lowerings.get(target)
    return found is None or found.__qualname__.startswith("fallback_handler.")


def keep_gpu_busy(cycles: int) -> None:
    """Let the current stream spin for so many clock cycles, while the host queues work behind it."""
    torch.cuda._sleep(cycles)


@contextlib.contextmanager
def quiet_profiler() -> Iterator[Any]:
    """torch's profiler with memory events, without the lines that its library prints."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    quiet = mock.patch.dict(os.environ, {"KINETO_LOG_LEVEL": "5"})
    with quiet, torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        yield profiler


def memory_events(profiler: Any) -> list[tuple[int, int]]:
    """Every allocation (+) and release (-) that a profiler saw: nanoseconds since the epoch, bytes; in order."""
    events = profiler.profiler.kineto_results.events()
    return [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]


# --- sizes ---------------------------------------------------------------------------------------------------


def nominal_size(size: int | torch.SymInt, nominal: int) -> int:
    """A concrete number for a possibly symbolic size: `nominal` for every symbol in it. Adds no guard.

    Not the size at hand, unless within `sizes_at_hand`: a plan must be the same whatever sizes a process happens to
    meet first.
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint if _AT_HAND.get() else None
    return _evaluated(size.node.expr, nominal) if hint is None else int(hint)


_AT_HAND: ContextVar[bool] = ContextVar("remat_sizes_at_hand", default=False)


@contextlib.contextmanager
def sizes_at_hand() -> Iterator[None]:
    """Count symbolic sizes as those of the call that is compiled: a budget in bytes means nothing else."""
    token = _AT_HAND.set(True)
    try:
        yield
    finally:
        _AT_HAND.reset(token)


@functools.cache
def _evaluated(expression: Any, nominal: int) -> int:
    if isinstance(expression, int):
        return expression
    return max(int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(nominal)))), 0)


@contextlib.contextmanager
def _nominal_sizes(nominal: int) -> Iterator[None]:
    """Let torch's partitioner size values as remat does."""
    name = "optimization_hint" if hasattr(partitioners, "optimization_hint") else "hint_int"
    sized = mock.patch.object(partitioners, name, lambda size, *_, **__: nominal_size(size, nominal))
    with sized if hasattr(partitioners, name) else contextlib.nullcontext():
        yield


# --- partitioning --------------------------------------------------------------------------------------------


def make_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module over a graph whose Python code is made when first asked for (0.2 s on 2,000 nodes, often never)."""
    from torch.fx._lazy_graph_module import _make_graph_module

    module: fx.GraphModule = _make_graph_module(root, graph)
    module.meta = dict(root.meta)
    return module


def apply_forced_saves(module: fx.GraphModule) -> None:
    """Write torch's own orders into the nodes' `recompute` tags: checkpoint boundaries, collectives, effects."""
    if partitioners.has_recomputable_ops(module):
        partitioners.cleanup_recompute_tags(module, is_default_partition=False)
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        partitioners.force_save_collectives(module)
    for name in ("force_save_effectful_ops", "force_save_bw_mutation_src"):
        mark = getattr(partitioners, name, None)
        if mark is not None:
            mark(module)


def default_cut(
    module: fx.GraphModule, num_fwd_outputs: int, static_indices: Sequence[int], nominal: int
) -> list[fx.Node]:
    """The values that PyTorch's own partitioner saves at its budget 1.0 (symbolic ones included)."""
    info = partitioners.classify_nodes(module, list(static_indices), num_fwd_outputs)
    if not info.required_bw_nodes:
        return []
    for node in reversed(module.graph.nodes):
        if node.op == "output":
            node.dist_from_bw = int(1e9)
        elif not info.is_required_fw(node):
            node.dist_from_bw = 0
        else:
            node.dist_from_bw = min((user.dist_from_bw + 1 for user in node.users), default=int(1e9))
    with _nominal_sizes(nominal):
        return list(partitioners.choose_saved_values_set(module.graph, info, memory_budget=1))


def extract(
    module: fx.GraphModule, saved: Sequence[fx.Node], num_fwd_outputs: int, static_indices: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """Split the joint graph with torch's own extraction, which knows the calling conventions of AOTAutograd.

    Returns forward, backward and the number of symbolic values passed between them.
    """
    primals = [node for node in module.graph.find_nodes(op="placeholder") if is_primal(node)]
    static = [primals[index] for index in static_indices if index < len(primals)]
    is_opaque = getattr(partitioners, "is_opaque_node", lambda node: False)
    symbolic = [node for node in saved if is_sym_node(node)]
    opaque = [node for node in saved if not is_sym_node(node) and is_opaque(node)]
    tensors = [node for node in saved if not is_sym_node(node) and not is_opaque(node)]
    arguments: dict[str, Any] = {
        "saved_sym_nodes": symbolic,
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_nodes": OrderedSet(static),
    }
    if "saved_opaque_nodes" in inspect.signature(partitioners._extract_fwd_bwd_modules).parameters:
        arguments["saved_opaque_nodes"] = opaque
    forward, backward = partitioners._extract_fwd_bwd_modules(module, tensors, **arguments)
    return forward, backward, len(symbolic)


def thread_rng_states(module: fx.GraphModule, is_backward: bool) -> fx.GraphModule:
    """Pass the random states of nested subgraphs through the outer graph, where this torch has them."""
    thread = getattr(partitioners, "thread_graphsafe_rng_from_hops", None)
    return module if thread is None else thread(module, is_backward=is_backward)


def partition_with_torch(
    module: fx.GraphModule, joint_inputs: Any, keywords: dict[str, Any], budget: float = 1.0
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's own partitioner; at budget 1.0, and only there, it is not known to recompute random draws."""
    with functorch_config.patch(activation_memory_budget=budget):
        return partitioners.min_cut_rematerialization_partition(module, joint_inputs, **keywords)


def memory_budget() -> float:
    """torch's own setting for the fraction of saved bytes; 1.0 where it is untouched."""
    return float(functorch_config.activation_memory_budget)


def written_input(description: Any) -> Any | None:
    """For the description of a forward output: the input that it replaces after the call, or None."""
    return description.mutated_input if isinstance(description, InputMutationAOTOutput) else None


def order_into_backward(node: fx.Node) -> None:
    """Tag a node so that torch's extraction puts it into the backward."""
    node.meta["partitioner_tag"] = "must_be_in_backward"


def was_in_place(node: fx.Node) -> bool:
    """Whether the user's operator behind this functional node wrote its first argument (`add_`)."""
    sources = node.meta.get("from_node") or ()
    names = [source.name.rstrip("0123456789") for source in sources]
    return any(name.endswith("_") and not name.startswith("__") for name in names)


def has_unbacked_bindings(node: fx.Node) -> bool:
    """Whether running this node defines a size that depends on data."""
    return bool(node.meta.get("unbacked_bindings"))


def is_higher_order(target: Any) -> bool:
    """Whether this is a higher-order operator (control flow, flex attention, triton wrappers, effects)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_script_object(value: Any) -> bool:
    """Whether this value of a node is an opaque object that must travel from forward to backward as it is."""
    from torch._library.fake_class_registry import FakeScriptObject

    return isinstance(value, BackwardState | FakeScriptObject | torch.ScriptObject)


def default_cache_folder() -> str:
    """Where Inductor keeps its caches; remat's plan summaries lie in a folder beside them."""
    return os.path.join(cache_dir(), "remat")
