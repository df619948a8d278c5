"""Plans for a peak-memory budget: the frontier of peak against recomputation, and the point of it that a budget takes.

Seeds are the default plan, PyTorch's, and minimum cuts at a ladder of prices of a byte; the search (search.py) goes
down from them. The frontier does not depend on the budget, so a smaller budget never takes a plan of higher peak or of
less recomputation. Op by op a point's peak is exact; under Inductor each is simulated fused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from torch import fx

from remat import ops
from remat.costs import FEMTOSECONDS, Costs
from remat.errors import BudgetUnreachable, RematWarning
from remat.joint import JointGraph
from remat.memory import simulate
from remat.mincut import CutSolver
from remat.network import build
from remat.plan import Plan, make_plan
from remat.rules import Rules
from remat.search import Frontier, Point, make_frontier
from remat.settings import Settings
from remat.step import TrainingStep, training_step

# Prices of a byte for the seeds, in units of moving it once: each rung four times the last. The search moves on from
# them; on the 12-layer GPT-2 a ladder twice as fine changed the frontier's cost by less than 1% (op by op).
SEED_PRICES: Final = (0.25, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)


@dataclass(frozen=True, eq=False)
class PeakPlanner:
    """Everything a plan for a budget is made from.

    scratch: the bytes that kernels take for themselves, op by op. seeds: plans that other solvers made.
    """

    joint: JointGraph
    costs: Costs
    rules: Rules
    settings: Settings
    scratch: Mapping[fx.Node, int]
    seeds: Sequence[Plan]

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
        """What may not be made twice. Values that last bits decide may be, op by op: there both runs are equal."""
        unwise = self.rules.unwise_recompute if self.fused else {}
        return frozenset(self.rules.no_recompute.keys() | unwise.keys())

    @cached_property
    def frontier(self) -> Frontier:
        """All points found."""
        seeds = []
        for plan in (*self.seeds, *self._cuts()):
            sequence = self.step.sequence_of(plan)
            if self.step.problem.why_illegal(sequence) is None:
                seeds.append((sequence, plan.solver))
        return make_frontier(self.step.problem, seeds)

    def _cuts(self) -> list[Plan]:
        """Minimum cuts at growing prices of a byte, on prices of single operators."""
        once = {node: "its operator may not run twice" for node in self.joint.nodes if self._operator(node) in self._once}
        once |= {node: "its operator may not run twice" for node in self._once}
        rules = replace(self.rules, no_recompute=self.rules.no_recompute | once, unwise_recompute={})
        number = self.step.number
        network = build(
            self.joint, rules, lambda n: 0, lambda n: self.step.problem.cost[number[n]] if n in number else 0
        )
        solver, found = CutSolver(network), []
        for multiple in SEED_PRICES:
            price = round(multiple * FEMTOSECONDS / self.costs.device.bytes_per_second)
            saved = [self.joint.nodes[position] for position in solver.minimum_cut(price).saved()]
            found.append(make_plan(self.joint, saved, "cut"))
        return found

    def _operator(self, node: fx.Node) -> fx.Node:
        source = node.args[0] if ops.is_item(node) else node
        return source if isinstance(source, fx.Node) else node

    def peak_bytes(self, plan: Plan) -> int:
        """The peak of a plan the way it will run."""
        return simulate(plan, self.fused, lambda n: self.scratch.get(n, 0)).peak_bytes

    # --- taking a point --------------------------------------------------------------------------------------

    def within(self, budget_bytes: int) -> Plan:
        """The plan of least recomputation whose peak is at most this; the smallest, with a warning, if there is none.

        Raises BudgetUnreachable under strict.
        """
        if not self.fused:
            point = self.frontier.within(budget_bytes)
            return self._plan(point) if point else self._unreachable(budget_bytes)
        for point in sorted(self.frontier.points, key=lambda point: (point.cost, -point.peak)):
            plan = self._plan(point)
            if self.peak_bytes(plan) <= budget_bytes:
                return plan
        return self._unreachable(budget_bytes)

    def smallest(self) -> Plan:
        """The plan of the smallest peak found."""
        if not self.fused:
            return self._plan(self.frontier.points[0])
        plans = [self._plan(point) for point in self.frontier.points]
        return min(plans, key=self.peak_bytes)

    def _bound(self) -> str:
        """Op by op there is a bound; fused, the simulator's bytes are not the problem's."""
        return "" if self.fused else f", and none has less than {self.step.problem.lower_bound_bytes():,}"

    def _plan(self, point: Point) -> Plan:
        return self.step.plan_of(point.sequence, point.origin)

    def _unreachable(self, budget_bytes: int) -> Plan:
        smallest = self.smallest()
        peak = self.peak_bytes(smallest)
        message = (
            f"budget={self.settings.budget} allows a peak of {budget_bytes:,} bytes; the smallest plan found for this "
            f"graph has {peak:,}{self._bound()}"
        )
        if self.settings.strict:
            raise BudgetUnreachable(message)
        warnings.warn(message + "; taking the smallest", RematWarning, stacklevel=2)
        return smallest
