"""`check`: run the joint graph whole beside the first training step, and compare.

At the first forward the inputs, the generators' states and the outputs are copied. At the backward of that very
step (told by the memory of the saved tensors) the joint graph, unpartitioned, runs on the copies through the same
inner compiler with the forward's generator states, and outputs, written inputs and gradients are compared. (What a
custom backward itself draws is the same only if nothing else drew between the forward and the backward.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from remat import ops
from remat.errors import CheckFailed
from remat.joint import JointGraph
from remat.session import Session

Compiled = Callable[[list[Any]], Any]
# Largest accepted relative error by dtype. Op by op the two runs are equal to the bit; Inductor compiles the joint
# graph into other kernels, whose sums differ in the last bits. A judgement: some hundred roundings of the dtype.
TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass
class Check:
    """The check of one joint graph: armed at the first forward, spent at that step's backward."""

    session: Session
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    saved: list[Any] = field(default_factory=list)  # held while armed, so that no address is used again
    done: bool = False

    def wrap_forward(self, compiled: Compiled) -> Compiled:
        """Record the first call of the forward."""

        def run(arguments: list[Any]) -> Any:
            if self.done or self.inputs:
                return compiled(arguments)
            self.states = _generator_states(arguments)
            kept = list(arguments)
            self.inputs = [_copied(value) for value in kept]
            results = compiled(arguments)
            count = self.session.num_fwd_outputs
            self.outputs = [_copied(value) for value in results[:count]]
            self.outputs += [_copied(value) for value in kept]  # with what the forward wrote into them
            self.saved = list(results[count:])
            return results

        return _boxed(run)

    def wrap_backward(self, module: fx.GraphModule, compiled: Compiled, compile_joint: Any) -> Compiled:
        """Compare at the backward that belongs to the recorded forward."""
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]

        def run(arguments: list[Any]) -> Any:
            tangents = {n: v for n, v in zip(names, arguments, strict=True) if "tangents" in n}
            saved = [v for n, v in zip(names, arguments, strict=True) if n not in tangents]
            mine = self.inputs and not self.done and _addresses(saved) <= _addresses(self.saved)
            copies = {name: _copied(value) for name, value in tangents.items()} if mine else {}
            results = compiled(arguments)
            if mine:
                self.done = True
                self._compare(copies, list(results), compile_joint)
                self.inputs, self.outputs, self.saved = [], [], []
            return results

        return _boxed(run)

    def _compare(self, tangents: dict[str, Any], gradients: list[Any], compile_joint: Any) -> None:
        joint = JointGraph(self.session.joint, self.session.num_fwd_outputs)  # type: ignore[arg-type]
        placeholders = [node for node in joint.nodes if node.op == "placeholder"]
        given = iter(self.inputs)
        arguments = [tangents[n.name] if n.name in tangents else next(given) for n in placeholders]
        run = compile_joint(joint.module)
        inputs = [value for node, value in zip(placeholders, arguments, strict=True) if node.name not in tangents]
        with _replaying(self.states):
            expected = list(run(list(arguments)))
        count = joint.num_fwd_outputs
        labels = [f"forward output {i} ({_label(v)})" for i, v in enumerate(joint.outputs[:count])]
        labels += [f"input {node.name} after the forward" for node in placeholders if node.name not in tangents]
        labels += [f"gradient {i} ({_label(v)})" for i, v in enumerate(joint.outputs[count:])]
        written_later = {
            ops.view_base(node.args[0]).name
            for node in joint.nodes
            if ops.is_mutating(node) and node in joint.tangent_closure and isinstance(node.args[0], fx.Node)
        }
        truths = [*expected[:count], *inputs, *expected[count:]]
        for label, mine, truth in zip(labels, [*self.outputs, *gradients], truths, strict=True):
            if not (label.startswith("input ") and label.split()[1] in written_later):
                compare(label, mine, truth, self.session.settings.check_tolerance)


def _label(value: object) -> str:
    return f"{value.name}; {ops.user_source(value)}" if isinstance(value, fx.Node) else str(value)


def compare(label: str, mine: Any, truth: Any, tolerance: float | None = None) -> None:
    """Raise CheckFailed, naming the tensor, where two values differ by more than the tolerance."""
    if not isinstance(truth, torch.Tensor) or not isinstance(mine, torch.Tensor):
        return
    if mine.dtype != truth.dtype or mine.shape != truth.shape:
        raise CheckFailed(
            f"{label}: {mine.dtype}{list(mine.shape)} in the partitioned step, {truth.dtype}{list(truth.shape)} in "
            "the joint graph"
        )
    if not truth.dtype.is_floating_point and not truth.dtype.is_complex:
        if not torch.equal(mine, truth):
            raise CheckFailed(f"{label}: {int((mine != truth).sum())} of {truth.numel()} elements differ")
        return
    allowed = TOLERANCE.get(truth.dtype, 1e-4) if tolerance is None else tolerance
    error = relative_error(mine, truth)
    if not error <= allowed:
        raise CheckFailed(f"{label}: relative error {error:.3g}, allowed {allowed:.3g}")


def relative_error(mine: torch.Tensor, truth: torch.Tensor) -> float:
    """2-norm of the difference over the 2-norm of the truth, in double precision; equal infinities and NaNs agree."""
    wide = torch.complex128 if truth.dtype.is_complex else torch.float64
    a, b = mine.detach().to(wide), truth.detach().to(wide)
    finite = torch.isfinite(b)
    if not torch.equal(torch.nan_to_num(a[~finite]), torch.nan_to_num(b[~finite])):
        return float("inf")
    a, b = a[finite], b[finite]
    difference = torch.linalg.vector_norm(a - b).item()
    return difference / max(torch.linalg.vector_norm(b).item(), 1e-30) if difference else 0.0


# --- copies -----------------------------------------------------------------------------------------------------


def _boxed(run: Compiled) -> Compiled:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _copied(value: Any) -> Any:
    """A copy with the same strides and storage offset, for overlapping views too."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if not value.numel():
        return value.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    flat = value.as_strided((span,), (1,)).clone()
    return flat.as_strided(value.shape, value.stride())


def _addresses(values: Sequence[Any]) -> set[int]:
    return {v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor)}


def _generator_states(values: Sequence[Any]) -> list[Any]:
    devices = sorted({v.device.index for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda"})
    return [torch.get_rng_state(), [(index, torch.cuda.get_rng_state(index)) for index in devices]]


class _replaying:
    """Set the generators to recorded states, and back at the end."""

    def __init__(self, states: list[Any]) -> None:
        self.states = states

    def __enter__(self) -> None:
        _, cuda = self.states
        self.before = [torch.get_rng_state(), [(index, torch.cuda.get_rng_state(index)) for index, _ in cuda]]
        self._set(self.states)

    def __exit__(self, *_: object) -> None:
        self._set(self.before)

    @staticmethod
    def _set(states: list[Any]) -> None:
        torch.set_rng_state(states[0])
        for index, state in states[1]:
            torch.cuda.set_rng_state(state, index)


def make_check(session: Session) -> Check | None:
    """A check for this compilation, if the settings ask for one."""
    return Check(session) if session.settings.check else None

