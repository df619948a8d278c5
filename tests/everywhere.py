"""One way to say "right at every plan": the default, budgets, and five random ones, compared with eager mode.

`assert_like_eager(fn, make, plan)` runs `fn` on inputs from `make()` for two steps, eager and compiled from the same
seeds, and compares outputs, gradients, the inputs after each step and the buffers of modules, and that the plan was
remat's own. `assert_like_the_whole_joint_graph` is for what draws random numbers, whose streams eager mode does not
share: there the step is compared, bit for bit, with the unpartitioned joint graph from the same generator state.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat
import remat.partitioner
from remat.partitioner import Decision

PLANS: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    # The fewest saved bytes: whatever may be recomputed is, once.
    "fewest": {"memory_price": 1e6},
    "min": {"budget": "min"},
    # Half the peak is out of reach for most of these graphs: then it is the smallest plan, with a warning.
    "half": {"budget": 0.5, "strict": False},
    **{f"random{seed}": {"plan_seed": seed} for seed in range(5)},
}
# Under these a value may be made more than twice, and a preference of a checkpoint policy is no order.
BUDGETS: Final = ("min", "half")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=pytest.mark.filterwarnings("ignore:budget=0.5 allows")) for p in PLANS]
)

Make = Callable[[], Sequence[Any]]


class Runs(TorchDispatchMode):
    """Counts the operators that run: around a backward, those of the compiled backward graph among them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def compiled(fn: Any, plan: str, *, inner: str = "eager", dynamic: bool | None = None, **options: Any) -> Any:
    """`fn` under one of `PLANS`, strict."""
    chosen = {"inner": inner, "strict": True, **PLANS[plan], **options}
    return torch.compile(fn, backend="remat", dynamic=dynamic, options=chosen)


def leaf(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    """A random leaf tensor, the same for the same seed, in double precision so that tolerances can be tight."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def flat(value: Any) -> list[Any]:
    """The leaves of nested outputs."""
    return list(torch.utils._pytree.tree_leaves(value))


def step(fn: Any, inputs: Sequence[Any]) -> dict[str, list[Any]]:
    """One forward and backward with a different weight on every element of every output that wants a gradient."""
    outputs = flat(fn(*inputs))
    total: Any = None
    for position, out in enumerate(outputs):
        if isinstance(out, Tensor) and out.requires_grad:
            real = torch.view_as_real(out) if out.is_complex() else out
            weights = torch.linspace(0.5, 1.5, max(real.numel(), 1), dtype=torch.float64)[: real.numel()]
            term = (real.double() * weights.reshape(real.shape)).sum() * (position + 1)
            total = term if total is None else total + term
    kept = [out.detach().clone() if isinstance(out, Tensor) else out for out in outputs]
    if total is not None:
        total.backward()
    tensors = [value for value in flat(list(inputs)) if isinstance(value, Tensor)]
    return {
        "output": kept,
        "gradient": [value.grad if value.is_leaf else None for value in tensors],
        "input after": [value.detach().clone() for value in tensors],
        # Writes of the backward into returned tensors show only now.
        "output after": [out.detach().clone() if isinstance(out, Tensor) else out for out in outputs],
    }


def same(mine: dict[str, list[Any]], truth: dict[str, list[Any]], rtol: float, atol: float) -> None:
    """Everything a step gave agrees, None with None."""
    for what, expected in truth.items():
        assert len(mine[what]) == len(expected), what
        for position, (a, b) in enumerate(zip(mine[what], expected, strict=True)):
            label = f"{what} {position}"
            if isinstance(b, Tensor):
                assert isinstance(a, Tensor), label
                named: Callable[[str], str] = functools.partial("{}: {}".format, label)
                torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True, msg=named)
            else:
                assert a == b, label


def planned_since(count: int, graphs: int | None = None) -> list[remat.PlanSummary]:
    """The summaries since then, all of them planned by remat; `graphs` is how many there must be, each at least once.

    Those of a step of several are planned again, together.
    """
    found = list(remat.summaries()[count:])
    assert found, "remat's partitioner did not run"
    assert all(summary.origin == "planned" for summary in found)
    joints = {(one.nodes, one.torch_saved_bytes, one.torch_predicted_peak_bytes) for one in found}
    several = any(summary.step_graphs for summary in found)
    assert graphs is None or (len(joints) if several else len(found)) == graphs
    return found


def assert_like_eager(
    fn: Any,
    make: Make,
    plan: str,
    *,
    steps: int = 2,
    inner: str = "eager",
    dynamic: bool | None = None,
    graphs: int | None = None,
    rtol: float = 1e-9,
    atol: float = 1e-12,
    **options: Any,
) -> list[remat.PlanSummary]:
    """Train `steps` steps eager and compiled; a module is copied first, and its parameters and buffers compared."""
    twin = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn
    before = len(remat.summaries())
    mine = compiled(twin, plan, inner=inner, dynamic=dynamic, **options)
    for _ in range(steps):
        truth, got = step(fn, make()), step(mine, make())
        if isinstance(fn, nn.Module):
            for results, module in ((truth, fn), (got, twin)):
                results["buffer"] = [value.detach().clone() for value in module.buffers()]
                results["parameter gradient"] = [p.grad for p in module.parameters()]
        same(got, truth, rtol, atol)
    return planned_since(before, graphs)


def assert_like_the_whole_joint_graph(
    fn: Any, make: Make, plan: str, *, steps: int = 2, inner: str = "eager", **options: Any
) -> list[remat.PlanSummary]:
    """Train under `check`, which raises on the first differing tensor; op by op to the bit."""
    before = len(remat.summaries())
    tolerance = {"check_tolerance": 0.0} if inner == "eager" else {}
    mine = compiled(fn, plan, inner=inner, check=True, **tolerance, **options)
    for _ in range(steps):
        step(mine, make())
    return planned_since(before)


@contextlib.contextmanager
def decisions() -> Iterator[list[Decision]]:
    """Collect what remat decides about each graph compiled meanwhile: its joint graph, plan, forward and backward."""
    found: list[Decision] = []
    decide = remat.partitioner.decide

    def recording(*arguments: Any) -> Decision:
        found.append(decide(*arguments))
        return found[-1]

    with mock.patch.object(remat.partitioner, "decide", recording):
        yield found


def kept_bytes(fn: Any, inputs: Sequence[Any]) -> tuple[Any, int]:
    """The outputs of `fn(*inputs)`, and the bytes of the distinct storages kept for the backward, inputs left out."""
    mine = {value.untyped_storage().data_ptr() for value in flat(list(inputs)) if isinstance(value, Tensor)}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in mine:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(value)  # so that no address is used again
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        outputs = fn(*inputs)
    return outputs, sum(storages.values())
