"""Plans for a peak-memory budget: the frontier of peak against recomputation, and the point of it that a budget takes.

Seeds are the default plan, PyTorch's, and the vertices of the convex frontier of saved bytes; the search (search.py)
goes down from them. The frontier does not depend on the budget, so a smaller budget never takes a plan of higher peak
or of less recomputation. Op by op a point's peak is exact; under Inductor some of the points are predicted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from torch import fx

from remat import fused_memory, ops
from remat.bound import RecomputeBound
from remat.costs import FEMTOSECONDS, Costs
from remat.errors import BudgetUnreachable, RematWarning
from remat.estimate import Estimate
from remat.frontier import convex_frontier
from remat.joint import JointGraph
from remat.memory import simulate
from remat.mincut import CutSolver
from remat.network import build
from remat.plan import Plan, make_plan
from remat.rules import Rules, why_invalid
from remat.search import Frontier, Point, make_frontier
from remat.settings import Settings
from remat.several import Choice, Memory, Share
from remat.step import TrainingStep, training_step

# Vertices of the convex frontier of recomputation against saved bytes that the search starts from: of more, those that
# leave the widest gaps. A 12-layer GPT-2 has 20 (39 cuts, 0.35 s).
SEED_VERTICES: Final = 16
# "min" does not go on where the last percents of memory cost whole forwards: the smallest peak found whose
# recomputation is at most this many forwards, in FLOPs. Below it a chain of 40 linear layers pays 0.6 forwards for 4%
# of its peak; a budget in bytes may ask for that.
MIN_FORWARDS: Final = 1.4
# Points of the frontier whose peak under Inductor is predicted, at 0.2 s for 2,000 nodes, whatever the budget; between
# two of them the best is bisected for. A 12-layer GPT-2 has 82 points.
SAMPLE: Final = 16


@dataclass(frozen=True)
class Certificate:
    """What is known of a plan for a budget; see PlanSummary."""

    budget_bytes: int
    smallest_peak_bytes: int
    peak_bound_bytes: int
    recompute_seconds: float
    recompute_bound_seconds: float
    step_seconds: float


@dataclass(frozen=True, eq=False)
class PeakPlanner:
    """Everything a plan for a budget is made from.

    scratch: the bytes that kernels take for themselves. seeds: plans that other solvers made. estimate: what a step of
    a plan takes under Inductor, each made once. share: of a step of several graphs what this one needs to know; peaks
    are then those of the whole step.
    """

    joint: JointGraph
    costs: Costs
    rules: Rules
    settings: Settings
    scratch: Mapping[fx.Node, int]
    seeds: Sequence[Plan]
    estimate: Callable[[Plan], Estimate]
    share: Share | None = None

    @property
    def fused(self) -> bool:
        """Whether the plan will run under Inductor."""
        return self.settings.inner == "inductor"

    @cached_property
    def step(self) -> TrainingStep:
        """The joint graph as plain data."""
        price = self.costs.rerun_price if self.fused else self.costs.run_price
        return training_step(self.joint, self.rules, price, lambda n: self.scratch.get(n, 0), self._once)

    @cached_property
    def _once(self) -> frozenset[fx.Node]:
        """What is not made twice."""
        return frozenset(self.rules.no_recompute.keys() | self.rules.unwise_recompute.keys())

    @cached_property
    def frontier(self) -> Frontier:
        """All points found."""
        seeds = []
        for plan in (*self.seeds, *self._cuts):
            sequence = self.step.sequence_of(plan)
            if self.step.problem.why_illegal(sequence) is None:
                seeds.append((sequence, plan.solver))
        return make_frontier(self.step.problem, seeds)

    @cached_property
    def _cuts(self) -> list[Plan]:
        """Vertices of the convex frontier of recomputing against saved bytes, at prices of single operators."""
        items = [node for node in self.joint.nodes if self._operator(node) in self._once]
        once = dict.fromkeys((*self._once, *items), "its operator may not run twice")
        rules = replace(self.rules, no_recompute=self.rules.no_recompute | once, unwise_recompute={})
        number = self.step.number
        network = build(
            self.joint, rules, lambda n: 0, lambda n: self.step.problem.cost[number[n]] if n in number else 0
        )
        vertices = convex_frontier(CutSolver(network), SEED_VERTICES)
        return [make_plan(self.joint, [self.joint.nodes[p] for p in vertex.saved], "cut") for vertex in vertices]

    def _operator(self, node: fx.Node) -> fx.Node:
        source = node.args[0] if ops.is_item(node) else node
        return source if isinstance(source, fx.Node) else node

    def peak_bytes(self, plan: Plan) -> int:
        """The peak of a plan the way it will run; where the graph is one of several, of the whole step."""
        return self.of_step(self.memory(plan))

    def of_step(self, memory: Memory) -> int:
        """The peak of the whole step if this graph takes so much."""
        return memory.peak_bytes if self.share is None else self.share.peak_bytes(memory)

    def memory(self, plan: Plan) -> Memory:
        """What a plan takes the way it will run, without the other graphs of a step."""
        if plan not in self._memories:
            if self.fused:
                found = fused_memory.timeline(plan, self.estimate(plan).lowering, self.scratch)
            else:
                found = simulate(plan, lambda n: self.scratch.get(n, 0))
            self._memories[plan] = found.memory
        return self._memories[plan]

    @cached_property
    def _memories(self) -> dict[Plan, Memory]:
        return {}

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What could be chosen for this graph, for a step of several: those that are best in some respect."""
        found = {Choice(self.memory(plan), self._seconds(plan)) for plan in self._candidates}
        return tuple(sorted(one for one in found if not any(_is_better(other, one) for other in found)))

    # --- taking a point --------------------------------------------------------------------------------------

    def within(self, budget_bytes: int) -> Plan:
        """The plan of least recomputation whose peak is at most this; the smallest, with a warning, if there is none.

        Raises BudgetUnreachable under strict.
        """
        found = self.find(budget_bytes)
        if found is None:
            found = self.smallest_of_all
            least = self.of_step(Memory(self.step.problem.lower_bound_bytes(), 0))
            bound = "" if self.fused else f", and none has less than {least:,}"
            self.unreachable(budget_bytes, f"{self.peak_bytes(found):,}{bound}")
        return found

    def find(self, budget_bytes: int) -> Plan | None:
        """The plan of least recomputation whose peak is at most this, under Inductor the fastest, if there is one."""
        if self._samples:
            fitting = [plan for plan in self._candidates if self.peak_bytes(plan) <= budget_bytes]
            return self._refined(min(fitting, key=self._seconds), budget_bytes) if fitting else None
        for at in range(len(self.frontier.points) - 1, -1, -1):
            # The plan itself has the last word: where sizes are symbolic, what they are read from lives longer.
            if self.frontier.points[at].peak <= budget_bytes and self.peak_bytes(self._plans[at]) <= budget_bytes:
                return self._plans[at]
        return None

    def _refined(self, found: Plan, budget_bytes: int) -> Plan:
        """Of the points between this one and the next one of the sample, one that fits and takes no longer."""
        low = next((at for at in self._sample if self._plans[at] is found), None)
        high = next((at for at in self._sample if low is not None and at > low), None)
        if low is None or high is None:
            return found
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak_bytes(self._plans[middle]) <= budget_bytes else (low, middle)
        return min(self._plans[low], found, key=self._seconds)

    def smallest(self) -> Plan:
        """The plan of the smallest peak found whose recomputation is at most MIN_FORWARDS."""
        return self.smallest_few(1)[0]

    def smallest_few(self, count: int) -> list[Plan]:
        """At most so many plans whose recomputation is at most MIN_FORWARDS, those of the smallest peaks, growing."""
        modest = [at for at, point in enumerate(self.frontier.points) if self._forwards(point) <= MIN_FORWARDS]
        places = modest or [0]
        if not self._samples:
            return [self._plans[at] for at in places[:count]]
        sampled = [at for at in self._sample if at in places] or places[:1]
        return sorted((*(self._plans[at] for at in sampled), *self._valid_seeds), key=self.peak_bytes)[:count]

    def certificate(self, plan: Plan, budget_bytes: int) -> Certificate:
        """How near to the best a plan for this budget is (0: "min")."""
        problem = self.step.problem
        cost = problem.recompute_cost(self.step.sequence_of(plan))
        allowed = budget_bytes or self.peak_bytes(plan)
        left = allowed if self.share is None else self.share.left_bytes(allowed)
        bound = 0 if self.fused else RecomputeBound(problem).within(left) or 0
        return Certificate(
            budget_bytes,
            smallest_peak_bytes=self.peak_bytes(self.smallest_of_all),
            peak_bound_bytes=0 if self.fused else self.of_step(Memory(problem.lower_bound_bytes(), 0)),
            recompute_seconds=cost / FEMTOSECONDS,
            recompute_bound_seconds=bound / FEMTOSECONDS,
            step_seconds=problem.baseline_cost / FEMTOSECONDS,
        )

    @cached_property
    def _plans(self) -> Sequence[Plan]:
        """The plans of the frontier, by growing peak op by op; each made when it is asked for."""
        return _Lazily(self.step, self.frontier.points)

    @property
    def smallest_of_all(self) -> Plan:
        """The plan of the smallest peak found, whatever it recomputes."""
        return min(self._candidates, key=self.peak_bytes) if self._samples else self._plans[0]

    @property
    def _samples(self) -> bool:
        """Whether peaks do not grow along the frontier, so that some of its points are judged one by one."""
        return self.fused or self.share is not None

    @property
    def _candidates(self) -> list[Plan]:
        """Under Inductor: some of what the frontier has, and seeds and cuts, which it may have left out.

        The frontier holds what is best op by op. The smallest peak of a 2-layer GPT-2 was 15.0 MiB among its points,
        and 11.6 MiB at a vertex of the convex frontier of saved bytes that op by op is no good.
        """
        return [*(self._plans[at] for at in self._sample), *self._valid_seeds]

    @cached_property
    def _sample(self) -> list[int]:
        """The points whose peak under Inductor is predicted whatever the budget: evenly spaced, both ends included."""
        last = len(self.frontier.points) - 1
        return sorted({round(last * part / (SAMPLE - 1)) for part in range(SAMPLE)})

    @cached_property
    def _valid_seeds(self) -> list[Plan]:
        return [plan for plan in (*self.seeds, *self._cuts) if why_invalid(plan, self.rules) is None]

    def _seconds(self, plan: Plan) -> float:
        """Of a step the way it will run."""
        if self.fused:
            return self.estimate(plan).step_seconds
        problem = self.step.problem
        return (problem.baseline_cost + problem.recompute_cost(self.step.sequence_of(plan))) / FEMTOSECONDS

    def _forwards(self, point: Point) -> float:
        """FLOPs that run again, in forwards; of a model that has none, the predicted time."""
        flops = [self.costs.flops.get(node, 0) if node is not None else 0 for node in self.step.operators]
        problem = self.step.problem
        once = sum(flops[operator] for operator in problem.before_boundary)
        if not once:
            flops = list(problem.cost)
            once = sum(flops[operator] for operator in problem.before_boundary)
        everything = sum(flops[operator] for operator in problem.order)
        return (sum(flops[operator] for operator in point.sequence) - everything) / max(once, 1)

    def unreachable(self, budget_bytes: int, smallest: str) -> None:
        """Warn that a budget cannot be met, and what the smallest peak is; BudgetUnreachable under strict."""
        message = (
            f"budget={self.settings.budget} allows a peak of {budget_bytes:,} bytes; the smallest plan found for this "
            f"graph has {smallest}{self._in_step()}"
        )
        if self.settings.strict:
            raise BudgetUnreachable(message)
        warnings.warn(message + "; taking the smallest", RematWarning, stacklevel=2)


    def _in_step(self) -> str:
        if self.share is None or not self.share.graphs:
            return ""
        return f", what the other graphs of a step of {self.share.graphs} have at that moment counted"


def _is_better(one: Choice, other: Choice) -> bool:
    """Whether one takes no more of anything and is not the same."""
    return one != other and one.seconds <= other.seconds and all(
        a <= b for a, b in zip(one.memory, other.memory, strict=True)
    )


class _Lazily(Sequence[Plan]):
    """Plans of points, each made once, when first asked for: writing one out takes longer than finding it."""

    def __init__(self, step: TrainingStep, points: Sequence[Point]) -> None:
        self.step, self.points = step, points
        self.made: dict[int, Plan] = {}

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, place: Any) -> Any:
        place = range(len(self.points))[place]
        if place not in self.made:
            point = self.points[place]
            self.made[place] = self.step.plan_of(point.sequence, point.origin)
        return self.made[place]
