"""Budgets that hold under Inductor: a plan is lowered, a dry run tells its peak, and if that is too much, plan again.

What a plan takes under Inductor is predicted within some percent; the dry run (dryrun.py) knows it to the byte. The
first plan is the one for the budget by prediction; each that is too large teaches by how much the prediction is off,
and the next is asked for that much less.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from remat import passes, torch_internals_lowering, torch_internals_schedule
from remat.budgets import PeakPlanner
from remat.dryrun import dry_run_partition
from remat.errors import BudgetUnreachable, RematWarning
from remat.passes.apart import keep_matmuls_apart
from remat.passes.partition import Partition
from remat.plan import Plan
from remat.plans import Candidate, Planner
from remat.settings import Settings
from remat.several import Memory
from remat.store import Document, open_store
from remat.torch_internals_lowering import Lowered

# Plans that are lowered for one budget, and if none fits those of TRIES_FOR_MIN.
MOST_TRIES: Final = 4
# For "min" so many of the plans of smallest predicted peak are lowered.
TRIES_FOR_MIN: Final = 3
# The document keeps the newest; each takes a hundred bytes.
MOST_REMEMBERED: Final = 1000
DOCUMENT: Final = "exact.json"


@dataclass(frozen=True)
class Tried:
    """A plan whose exact peak is known, in bytes, of the whole step, and what its graph alone takes.

    limit_bytes: the predicted peak that was asked for.
    """

    plan: Plan
    peak_bytes: int
    memory: Memory
    limit_bytes: int


@dataclass(frozen=True, eq=False)
class Settled:
    """A plan for the budget with its partition; `memory`: what it takes exactly, None where it could not be had."""

    candidate: Candidate
    partition: Partition
    memory: Memory | None


def schedule(settings: Settings) -> contextlib.AbstractContextManager[None]:
    """Around whatever lowers a graph: what holds Inductor to the plan's schedule, where the settings want it."""
    return torch_internals_schedule.kept_schedule() if settings.keeps_schedule() else contextlib.nullcontext()


def is_wanted(planner: Planner) -> bool:
    """Whether a budget has to be held exactly that Inductor's code may break.

    Not where sizes are symbolic and the budget is a fraction: it is one at nominal sizes, the dry run's are those at
    hand. Nor where others follow of which nothing is known yet.
    """
    settings, share = planner.settings, planner.share
    if not settings.exact or settings.inner != "inductor" or not settings.wants_peak():
        return False
    if share is not None and not share.graphs:
        return False
    return isinstance(settings.budget, int) or not planner.joint.has_symbolic_sizes


def search(planner: PeakPlanner, budget_bytes: int, exact: Callable[[Plan], Memory]) -> Tried:
    """The first plan found whose exact peak is within the budget; where none is, the smallest of those tried.

    budget_bytes: 0 asks for the smallest peak. exact: what a plan takes, without the other graphs of a step.
    """
    tried: list[Tried] = []

    def attempt(plan: Plan, limit: int) -> Tried:
        memory = exact(plan)
        tried.append(Tried(plan, planner.of_step(memory), memory, limit))
        return tried[-1]

    def is_known(plan: Plan) -> bool:
        return any(plan is earlier.plan for earlier in tried)

    limit = budget_bytes
    while budget_bytes and len(tried) < MOST_TRIES:
        plan = planner.find(limit) or planner.smallest_of_all
        if is_known(plan):
            break
        if attempt(plan, limit).peak_bytes <= budget_bytes:
            return tried[-1]
        predicted = planner.peak_bytes(plan)
        limit = min(predicted - 1, predicted * budget_bytes // tried[-1].peak_bytes)
    # What "min" finds is found for a budget of its peak too.
    for plan in planner.smallest_few(TRIES_FOR_MIN):
        if not is_known(plan) and attempt(plan, planner.peak_bytes(plan)).peak_bytes <= budget_bytes:
            break
    return min(tried, key=lambda one: one.peak_bytes)


@dataclass(frozen=True, eq=False)
class Exactly:
    """Plans of one graph for one budget, lowered; `graph` is the hash that what was found is remembered by, if any."""

    planner: Planner
    graph: str | None
    _partitions: dict[Plan, Partition] = field(default_factory=dict)
    _forwards: dict[str, Lowered] = field(default_factory=dict)

    def settle(self) -> Settled:
        """A plan within the budget, by its exact peak; the smallest with a warning if there is none.

        Where a plan cannot be lowered, one RematWarning says why, and the prediction has to do. Raises what stopped it,
        and BudgetUnreachable, under strict.
        """
        planner, budget = self.planner, self.planner.allowed_bytes
        strict = planner.settings.strict
        reason = torch_internals_lowering.why_not_lowered()
        if reason is None:
            try:
                found = self._remembered() or self._searched()
            except BudgetUnreachable:
                raise
            except Exception as error:  # what the dry run cannot execute may compile all the same
                if strict:
                    raise
                reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            warnings.warn(f"the budget is held by prediction only: {reason}", RematWarning, stacklevel=2)
            return self.predicted()
        if budget and found.peak_bytes > budget:
            planner.peaks.unreachable(budget, f"{found.peak_bytes:,} under Inductor")
        return Settled(planner.certified(found.plan), self._partition(found.plan), found.memory)

    def predicted(self) -> Settled:
        """The plan that the settings ask for, its peak as predicted."""
        candidate = self.planner.chosen[0]
        return Settled(candidate, self._partition(candidate.plan), None)

    def within(self, candidate: Candidate, first: Settled) -> Settled | None:
        """Another plan with its partition; None where the first keeps the budget exactly and this does not."""
        memory = None if first.memory is None else self.memory(candidate.plan)
        of_step = self.planner.peaks.of_step
        if memory and first.memory and of_step(memory) > max(self.planner.allowed_bytes, of_step(first.memory)):
            return None
        return Settled(candidate, self._partition(candidate.plan), memory)

    def memory(self, plan: Plan) -> Memory:
        """What a plan takes exactly."""
        joint = self.planner.joint
        with schedule(self.planner.settings):
            found = dry_run_partition(self._partition(plan), joint, forwards=self._forwards)
        return Memory(found.peak_bytes, found.saved_bytes)

    def _partition(self, plan: Plan) -> Partition:
        if plan not in self._partitions:
            partition = passes.rewrite(plan, self.planner.rules)
            held = self.planner.settings.keeps_schedule()
            self._partitions[plan] = keep_matmuls_apart(partition) if held else partition
        return self._partitions[plan]

    def _searched(self) -> Tried:
        found = search(self.planner.peaks, self.planner.allowed_bytes, self.memory)
        if self.graph is not None:
            graph = self.graph
            entry = {"limit": found.limit_bytes, "plan": digest(found.plan), **found.memory._asdict()}
            open_store(self.planner.settings.cache_dir).update(DOCUMENT, lambda old: _with(old, graph, entry))
        return found

    def _remembered(self) -> Tried | None:
        """What an earlier process found for this graph, if the same plan comes of it again."""
        if self.graph is None:
            return None
        entry = _entries(open_store(self.planner.settings.cache_dir).read(DOCUMENT)).get(self.graph)
        if not isinstance(entry, dict):
            return None
        limit, peak, held = (entry.get(key) for key in ("limit", *Memory._fields))
        if type(limit) is not int or type(peak) is not int or type(held) is not int:
            return None
        peaks, memory = self.planner.peaks, Memory(peak, held)
        plans = peaks.smallest_few(TRIES_FOR_MIN)
        if self.planner.allowed_bytes:
            plans = [peaks.find(limit) or peaks.smallest_of_all, *plans]
        tried = (Tried(plan, peaks.of_step(memory), memory, limit) for plan in plans)
        return next((one for one in tried if digest(one.plan) == entry.get("plan")), None)


def _entries(document: Document | None) -> Document:
    entries = None if document is None else document.get("graphs")
    return entries if isinstance(entries, dict) else {}


def _with(document: Document | None, graph: str, entry: Document) -> Document:
    kept = {**_entries(document), graph: entry}
    return {"graphs": dict(list(kept.items())[-MOST_REMEMBERED:])}


def digest(plan: Plan) -> str:
    """A hash of what a plan saves and runs, and in which order."""
    text = repr(([node.name for node in plan.saved], plan.forward_names, plan.backward_names))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
