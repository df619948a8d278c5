"""Learning which graphs make a training step, and compiling them again when they have to share its budget.

Dynamo compiles a graph when it is first called, before it knows what follows. So the graphs of code with a break in it
are first planned to take little, and another that is called after some gets what they leave. Every compiled graph is
wrapped to see the order of forwards, and where a backward begins, which graphs still hold what they saved. When the
next step starts, all graphs of the last one are planned together (several.py), and those that get another plan are
compiled again, under the state that Dynamo compiled them in.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import fx

from remat.errors import RematWarning
from remat.report import PlanSummary
from remat.settings import Settings
from remat.several import Chain, Member, Memory, Share, before_others, budget_bytes, settle, share_of
from remat.torch_internals_dynamo import (
    backward_node,
    compiling_again,
    copy_dynamo_graph,
    ends_in_graph_break,
    runs_in_broken_code,
)
from remat.tune import is_trained

# A graph is compiled again at most so often. Steps that differ each time, an unrolled loop that grows, would compile
# for ever; a judgement.
MOST_AGAIN: Final = 3

# Compiles a Dynamo graph for a share of a step. None: nothing was planned that a step could be planned by.
Compile = Callable[[fx.GraphModule, Sequence[Any], Share | None], tuple[Any, PlanSummary | None]]

_NUMBERS = itertools.count()
_LOCK = threading.RLock()


@dataclass(eq=False)
class _Call:
    """A forward whose backward has not begun; it dies with the autograd graph."""

    part: Part
    thread: int


@dataclass(eq=False)
class _Group:
    """The graphs compiled for one budget. chains: the steps seen. due: the graphs to compile again at the next call."""

    budget: int | float | str
    parts: weakref.WeakValueDictionary[int, Part] = field(default_factory=weakref.WeakValueDictionary)
    chains: list[Chain] = field(default_factory=list)
    changed: bool = False
    due: set[int] = field(default_factory=set)

    def learn(self, chain: Chain) -> None:
        """Note a step, unless a longer one is known that begins alike."""
        if len(chain) < 2 or any(known[: len(chain)] == chain for known in self.chains):
            return
        self.chains = [known for known in self.chains if chain[: len(known)] != known] + [chain]
        self.changed = True

    def plan(self) -> None:
        """Choose the plans of all graphs together."""
        self.changed = False
        self.chains = [chain for chain in self.chains if all(number in self.parts for number in chain)]
        for chains in _connected(self.chains):
            members = {number: self.parts[number].member for chain in chains for number in chain}
            chosen = settle(chains, members, self.budget)
            for number, choice in chosen.items():
                if choice.memory != self.parts[number].predicted:
                    self.due.add(number)
                    self.parts[number].member = replace(members[number], memory=choice.memory)
        for number in {number for chain in self.chains for number in chain} - self.due:
            share, part = self.share(number), self.parts[number]
            if isinstance(share.budget, int) and share.peak_bytes(part.member.memory) > share.budget:
                self.due.add(number)

    def share(self, number: int) -> Share:
        """What the others leave to a graph of a step that is known."""
        chains = next(chains for chains in _connected(self.chains) if any(number in chain for chain in chains))
        members = {number: self.parts[number].member for chain in chains for number in chain}
        budget = budget_bytes(chains, members, self.budget) or self.budget
        return share_of(number, [chain for chain in chains if number in chain], members, budget)


_GROUPS: dict[tuple[int | float | str | None, str], _Group] = {}
_LIVE: dict[int, list[weakref.ref[_Call]]] = {}


def _connected(chains: Sequence[Chain]) -> list[list[Chain]]:
    """Chains by the graphs that they have in common."""
    found: list[list[Chain]] = []
    for chain in chains:
        touching = [group for group in found if any(set(chain) & set(other) for other in group)]
        found = [group for group in found if group not in touching]
        found.append([*(other for group in touching for other in group), chain])
    return found


def _calls(thread: int) -> list[_Call]:
    """The forwards of a thread that hold what they saved, in order."""
    return [call for reference in _LIVE.get(thread, ()) if (call := reference()) is not None]


def _live(group: _Group) -> list[_Call]:
    """Those of this thread and of one budget."""
    return [call for call in _calls(threading.get_ident()) if call.part.group is group]


def _group(settings: Settings) -> _Group:
    assert settings.budget is not None
    key = (settings.budget, settings.inner)
    return _GROUPS.setdefault(key, _Group(settings.budget))


def auto_budget_bytes() -> int | None:
    """What `budget="auto"` stands for in the step under way, of which earlier graphs hold memory already."""
    found = (call.part.auto_bytes for call in _calls(threading.get_ident()))
    return next((count for count in found if count), None)


def compile_part(
    module: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, is_auto: bool, compile_for: Compile
) -> Any:
    """Compile a Dynamo graph for its part in a step; the result learns what the others are, and shares the budget."""
    shares = settings.wants_peak() and is_trained(module, example_inputs)
    again = compiling_again(module) if shares else None
    if again is None:
        return compile_for(module, example_inputs, None)[0]
    group = _group(settings)
    number = next(_NUMBERS)
    copy = copy_dynamo_graph(module, share_tensors=True)
    share = _first_share(module, group, number)
    compiled, summary = compile_for(module, example_inputs, share)
    if summary is None or summary.reference is None:
        return compiled
    trainable = [value for value in example_inputs if value.requires_grad and value.is_leaf]
    gradients = sum(value.numel() * value.element_size() for value in trainable)
    part = Part(group, number, compiled, compile_for, again, copy, settings.strict, gradients)
    part.auto_bytes = settings.budget if is_auto and isinstance(settings.budget, int) else 0
    part.take(summary)
    group.parts[number] = part
    return part


def _first_share(module: fx.GraphModule, group: _Group, number: int) -> Share | None:
    if ends_in_graph_break(module) or runs_in_broken_code():
        return before_others()
    before = _live(group)
    if not before:
        return None
    members = {call.part.number: call.part.member for call in before}
    return share_of(number, [(*(call.part.number for call in before), number)], members, group.budget)


class Part:
    """A compiled graph that is called in the place of one, and may be compiled again."""

    def __init__(
        self,
        group: _Group,
        number: int,
        compiled: Any,
        compile_for: Compile,
        again: Any,
        module: fx.GraphModule,
        strict: bool,
        gradient_bytes: int,
    ) -> None:
        self.group, self.number, self.auto_bytes = group, number, 0
        self._compiled, self._compile_for, self._module = compiled, compile_for, module
        self._compiling_again, self._count = again, 0
        self._strict, self._gradient_bytes = strict, gradient_bytes

    def take(self, summary: PlanSummary) -> None:
        """Note what the plan takes that is compiled now."""
        assert summary.reference is not None
        memory = Memory(summary.exact_peak_bytes or summary.predicted_peak_bytes, summary.held_bytes)
        self.predicted = Memory(summary.predicted_peak_bytes, summary.predicted_held_bytes)
        self.member = Member(memory, summary.reference, self._gradient_bytes, summary.choices)

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        if not torch.is_grad_enabled():
            return self._compiled(*args)
        with _LOCK:
            if self.group.changed and not _live(self.group):
                self.group.plan()
            if self.number in self.group.due:
                self.group.due.remove(self.number)
                self._compile_again(args)
        results = self._compiled(*args)
        self._watch(results)
        return results

    def _compile_again(self, args: Sequence[Any]) -> None:
        self._count += 1
        if self._count > MOST_AGAIN:
            return
        module = copy_dynamo_graph(self._module, share_tensors=True)
        try:
            with self._compiling_again(args) as inputs:
                compiled, summary = self._compile_for(module, inputs, self.group.share(self.number))
        except Exception as error:  # the plan of the step before is as right, only larger
            if self._strict:
                raise
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"a graph is not planned for its step: {reason}", RematWarning, stacklevel=2)
            return
        self._compiled = compiled
        if summary is not None and summary.reference is not None:
            self.take(summary)

    def _watch(self, results: Any) -> None:
        """Note the forward until its backward begins, or what it saved is dropped."""
        node = backward_node(results)
        if node is None:
            return
        call = _Call(self, threading.get_ident())
        with _LOCK:
            _LIVE[call.thread] = [weakref.ref(one) for one in (*_calls(call.thread), call)]
        node.register_prehook(functools.partial(_begin_backward, call))


def _begin_backward(call: _Call, gradients: Any) -> None:
    """Note the step: the forwards whose backward has not begun. Those called after this one will have none."""
    with _LOCK:
        calls = _calls(call.thread)
        if call not in calls:
            return
        place = calls.index(call)
        call.part.group.learn(tuple(one.part.number for one in calls if one.part.group is call.part.group))
        if place:
            _LIVE[call.thread] = [weakref.ref(one) for one in calls[:place]]
        else:
            del _LIVE[call.thread]
