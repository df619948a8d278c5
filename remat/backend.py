"""The entry point: `torch.compile(model, backend="remat")`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from remat import auto, exact, registry, session, settings, snapshot, stepwise, torch_internals, tune
from remat.check import Check, make_check
from remat.eager import compile_op_by_op
from remat.errors import SettingError
from remat.partitioner import Partitioner
from remat.report import PlanSummary
from remat.settings import Settings
from remat.several import Share


def remat(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a Dynamo graph with Inductor, its forward/backward partition decided by remat.

    `options` may hold remat's settings (`python -m remat flags`) and Inductor's own; `mode` is Inductor's.
    Raises SettingError for an unknown key or a value that is not allowed, and under `strict` whatever stopped
    the partitioner.
    """
    resolved, rest = settings.resolve(options, passthrough=torch_internals.inductor_options())
    if mode is not None and mode not in torch_internals.known_modes():
        raise SettingError(f"mode={mode!r} is not allowed: one of {', '.join(torch_internals.known_modes())}")
    if resolved.partitioner == "torch" and (isinstance(resolved.budget, int) or resolved.budget == "auto"):
        raise SettingError("partitioner=torch takes no budget in bytes: a fraction of saved bytes in (0, 1], or min")
    resolved = _with_torchs_budget(resolved)
    patches = torch_internals.inductor_patches(mode, rest)
    device = _device(example_inputs)
    is_auto = resolved.budget == "auto"
    if is_auto:
        budget = stepwise.auto_budget_bytes() or auto.budget_bytes(device, example_inputs)
        resolved = dataclasses.replace(resolved, budget=budget)
    prices = snapshot.load(device, resolved)

    def compile_for(own: fx.GraphModule, inputs: Sequence[Any], share: Share | None) -> tuple[Any, PlanSummary | None]:
        return _Call(tuple(inputs), resolved, patches, prices, share=share).tuned(own, device)

    return stepwise.compile_part(gm, example_inputs, resolved, is_auto, compile_for)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of the backend: what every compilation of its graph is made from."""

    example_inputs: tuple[Any, ...]
    settings: Settings
    patches: dict[str, Any]
    prices: snapshot.Snapshot
    is_trial: bool = False
    share: Share | None = None

    def tuned(self, gm: fx.GraphModule, device: torch.device) -> tuple[Any, PlanSummary | None]:
        """Compile by the promising plan that is fastest; with its summary, if one was made."""
        # A trial checks and dumps nothing.
        unwatched = dataclasses.replace(self.settings, check=False, dump=None)
        trial = dataclasses.replace(self, settings=unwatched, is_trial=True)

        def compile_plan(own: fx.GraphModule, choice: int) -> Any:
            return trial.compile(own, choice)[0]

        choice = tune.choose(gm, self.example_inputs, self.settings, self.graph_hash(gm), device, compile_plan)
        compiled, summaries = self.compile(gm, choice)
        return compiled, summaries[0] if len(summaries) == 1 else None

    def compile(self, gm: fx.GraphModule, choice: int) -> tuple[Any, list[PlanSummary]]:
        """Compile by one of the promising plans (tune.py); Inductor may write into `gm`."""
        resolved, patches = self.settings, self._patches(choice)
        compiling = session.compiling(self.graph_hash(gm, choice), resolved, self.prices, self.is_trial)
        with compiling as compilation, ExitStack() as stack:
            bypass = resolved.inner == "eager" or resolved.check or resolved.dump is not None
            if bypass:
                # These must see the partitioner run, or make code that no cache can hold.
                patches["fx_graph_cache"] = False
                stack.enter_context(torch_internals.without_compile_caches())
            if self.is_trial:
                stack.enter_context(torch_internals.backward_compiled_at_once())
            check = make_check(compilation)
            compiled = torch_internals.compile_with_inductor(
                gm, self.example_inputs, patches, lambda inner: _inner_compiler(inner, resolved, check, patches)
            )
            if not bypass and not self.is_trial:
                _keep_summaries(compilation)
        return compiled, compilation.summaries

    def graph_hash(self, gm: fx.GraphModule, choice: int = 0) -> str:
        """The hash of the graph, under these settings and compiled by this plan."""
        patches = sorted(map(repr, self._patches(choice).items()))
        key = (self.settings.cache_key(), self.prices.hash, registry.cache_key(), patches)
        return session.graph_hash(gm, self.example_inputs, key)

    def _patches(self, choice: int) -> dict[str, Any]:
        partitioner = Partitioner(self.settings.for_compiled_code(), self.prices.hash, choice, self.share)
        return {**self.patches, "custom_partitioner_fn": partitioner}


def _device(example_inputs: Sequence[Any]) -> torch.device:
    """Where the graph runs: the device of the first tensor on an accelerator, else the CPU."""
    found = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    return next((device for device in found if device.type not in ("cpu", "meta")), torch.device("cpu"))


def _with_torchs_budget(resolved: Settings) -> Settings:
    """torch's `activation_memory_budget` stands for ours where ours is not set."""
    fraction = torch_internals.memory_budget()
    if resolved.budget is not None or resolved.partitioner == "torch" or not fraction < 1:
        return resolved
    return dataclasses.replace(resolved, budget=fraction if fraction > 0 else "min")


def _keep_summaries(compilation: session.Session) -> None:
    """Write down what was planned; on a warm cache, where nothing was, show what an earlier process planned."""
    if compilation.summaries:
        session.remember(compilation)
        return
    for summary in session.recall(compilation):
        session.record(summary)


def _inner_compiler(
    inner: Callable[..., Any], resolved: Settings, check: Check | None, patches: dict[str, Any]
) -> Callable[..., Any]:
    """What compiles each of the two graphs: Inductor or the op-by-op executor, watched by the check if there is one."""

    def compile_graph(module: fx.GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Any:
        if resolved.inner == "eager":
            return compile_op_by_op(module)
        with torch_internals.random_numbers_by_element(), exact.schedule(resolved):
            return inner(module, example_inputs, **keywords)

    if check is None:
        return compile_graph

    def compile_watched(module: fx.GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Any:
        compiled = compile_graph(module, example_inputs, **keywords)
        if keywords.get("is_inference"):
            return compiled
        if keywords.get("is_backward"):
            return check.wrap_backward(
                module,
                compiled,
                lambda joint: torch_internals.compile_joint_graph(compile_graph, joint, patches),
            )
        return check.wrap_forward(compiled)

    return compile_watched
