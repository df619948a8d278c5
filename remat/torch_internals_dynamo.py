"""Private names of torch that concern Dynamo's graphs and AOTAutograd's backward nodes (see torch_internals)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._subclasses.fake_tensor import FakeTensor


def copy_dynamo_graph(module: fx.GraphModule, *, share_tensors: bool = False) -> fx.GraphModule:
    """A copy for Inductor to write into, of the tensors that the module holds too unless they are shared.

    With what Dynamo noted on module and nodes as plain attributes, which a deep copy leaves out: from them torch knows
    the parameters among the inputs, without which the plans and the code would be others.
    """
    tensors = [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]
    tensors += [*module.parameters(), *module.buffers()]
    own = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors} if share_tensors else {})
    for old, new in ((module, own), *zip(module.graph.nodes, own.graph.nodes, strict=True)):
        for name in vars(old).keys() - vars(new).keys():
            setattr(new, name, vars(old)[name])
    return own


def ends_in_graph_break(module: fx.GraphModule) -> bool:
    """Whether Dynamo ended the graph where it had to leave compiled code: it will come back and compile the rest."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def are_static_fakes(example_inputs: Sequence[Any]) -> bool:
    """Whether these are tensors that take no memory, all of their sizes known."""
    return all(
        isinstance(value, FakeTensor) and not any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
        for value in example_inputs
    )


def compiling_context() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What compiles a graph of Dynamo's again later, under the state that it is being compiled in now.

    As AOTAutograd does for a backward that it compiles at its first run.
    """
    traced, compiled = TracingContext.try_get(), CompileContext.try_get()

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(enabled=True), tracing(traced), compile_context(compiled):
            yield

    return again


def backward_node(results: Any) -> Any | None:
    """The autograd node of AOTAutograd's backward among those that made a compiled graph's results; None without one.

    A result that is a view of another has nodes of views before it.
    """
    pending = [value.grad_fn for value in results if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    before = [earlier for node in pending for earlier, _ in node.next_functions if earlier is not None]
    return next((node for node in (*pending, *before) if "CompiledFunction" in node.name()), None)
