"""The joint graph of a function, taken out of torch.compile before anything is planned or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from remat import torch_internals
from remat.joint import JointGraph


class _Captured(Exception):
    """Carries a joint graph out of torch.compile."""

    def __init__(self, joint: JointGraph) -> None:
        super().__init__("the joint graph was taken")
        self.joint = joint


class _Taker(torch_internals.CustomPartitionerFn):
    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
        static = tuple(keywords.get("static_lifetime_input_indices") or ())
        raise _Captured(JointGraph(gm, keywords["num_fwd_outputs"], static))

    def uuid(self) -> Any:
        return None


class _NoBackward(Exception):
    """Nothing is differentiated: Inductor would compile the graph as it is, and run it."""


def _refuse(module: fx.GraphModule, example_inputs: Any, **keywords: Any) -> Any:
    raise _NoBackward("the partitioner did not run: nothing here requires a gradient")


def _take(gm: fx.GraphModule, example_inputs: Any) -> Any:
    with torch_internals.without_compile_caches():
        patches = {"custom_partitioner_fn": _Taker()}
        return torch_internals.compile_with_inductor(gm, example_inputs, patches, lambda inner: _refuse)


def joint_graph(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> JointGraph:
    """The joint graph of `fn(*args)`, as AOTAutograd gives it to a partitioner; nothing runs.

    Raises ValueError where nothing requires a gradient, and torch's own errors where the function does not compile as
    one graph.
    """
    torch.compiler.reset()
    try:
        torch.compile(fn, backend=_take, fullgraph=True, dynamic=dynamic)(*args)
    except Exception as error:  # torch wraps what its backend raises
        captured = getattr(error, "inner_exception", error)
        if isinstance(captured, _NoBackward):
            raise ValueError(str(captured)) from None
        if not isinstance(captured, _Captured):
            raise
        return captured.joint
    finally:
        torch.compiler.reset()
    raise ValueError("nothing was compiled here: there is no graph")
