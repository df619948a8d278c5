"""Private names of torch that concern Dynamo's graphs and AOTAutograd's backward nodes (see torch_internals)."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import CompileContext, TracingContext, compile_context, tracing


def copy_dynamo_graph(module: fx.GraphModule, *, share_tensors: bool = False) -> fx.GraphModule:
    """A copy for Inductor to write into, of the tensors that the module holds too unless they are shared.

    With what Dynamo noted on module and nodes as plain attributes, which a deep copy leaves out: from them torch knows
    the parameters among the inputs, without which the plans and the code would be others.
    """
    tensors = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
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


def runs_in_broken_code() -> bool:
    """Whether the frame that is being compiled was called by user's code that Dynamo left to Python: others come.

    A frame that Dynamo goes on in after a break, or one of a function that code with a break in it calls.
    """
    library, seen = str(Path(torch.__file__).parent), False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith("_dynamo/convert_frame.py"):
            seen = False  # what was before is the compiler
        elif name.endswith("_dynamo/eval_frame.py") and frame.f_code.co_name == "compile_wrapper":
            return seen
        seen |= not name.startswith((library, "<"))
        frame = frame.f_back
    return False


def compiling_again(
    module: fx.GraphModule,
) -> Callable[[Sequence[Tensor]], contextlib.AbstractContextManager[list[Tensor]]] | None:
    """What compiles a graph of Dynamo's again at a later call, under the state that it is being compiled in now.

    As AOTAutograd does for a backward that it compiles at its first run. The context is given the tensors of that call,
    and gives what to compile with, which takes no memory. None where a size is symbolic: to compile could add guards,
    which nobody would check any more.
    """
    traced, compiled = TracingContext.try_get(), CompileContext.try_get()
    values = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    static = all(isinstance(value, Tensor) and not value._has_symbolic_sizes_strides for value in values)
    if traced is None or traced.fake_mode is None or not static or list(module.parameters()):
        return None
    mode = traced.fake_mode

    @contextlib.contextmanager
    def again(inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        used = {value.device.index or 0 for value in inputs if value.device.type == "cuda"}
        with torch.random.fork_rng(devices=used), tracing(traced), compile_context(compiled):
            yield [mode.from_tensor(value, static_shapes=True) for value in inputs]

    return again


def backward_node(results: Any) -> Any | None:
    """The autograd node of AOTAutograd's backward among those that made a compiled graph's results; None without one.

    A result that is a view of another has nodes of views before it.
    """
    pending = [value.grad_fn for value in results if isinstance(value, Tensor) and value.grad_fn is not None]
    before = [earlier for node in pending for earlier, _ in node.next_functions if earlier is not None]
    return next((node for node in (*pending, *before) if "CompiledFunction" in node.name()), None)
