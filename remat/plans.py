"""Choosing a plan: the default, one for a budget (budgets.py), or a random one for tests.

The default plan is the one of lowest peak among the candidates that are predicted to be no worse than PyTorch's default
cut in saved bytes, peak, FLOPs and time, and on a GPU in traffic and kernels. Candidates are that cut and the minimum
cuts at a ladder of prices of a byte, vertices of the frontier, where no byte is kept that is not worth its price, and
what lies between two of them.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from torch import fx

from remat import costs as cost_model
from remat import fused_memory, fusion, ops, torch_internals
from remat.budgets import Certificate, PeakPlanner
from remat.costs import Costs
from remat.estimate import Estimate
from remat.joint import JointGraph
from remat.memory import Timeline, simulate
from remat.mincut import CutSolver
from remat.network import FlowNetwork, build
from remat.plan import Plan, make_plan
from remat.rules import Rules, why_invalid
from remat.scratch import learn_scratch, learn_scratch_outside
from remat.settings import Settings
from remat.several import Memory, Share

# Prices of a byte at which the default plan tries a cut, in units of reading that byte once from memory: each rung
# twice the last where plans differ most. A judgement: a finer ladder finds more vertices and costs a cut a rung.
PRICE_LADDER: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
# Inductor reorders and writes in place as the simulator does not know: for the default plans of MLP, GPT-2, Llama, BERT
# and ViT the measured peak was between 4% below the simulated one and 4% above. On a chain of linear layers with GELU
# two plans of the same simulated peak (81.05 MiB) came out at 80.05 and 81.00. So a plan must be predicted this much
# lower to be taken as no higher.
FUSED_PEAK_MARGIN: Final = 0.04
# The same on a GPU, where generated code shares buffers across more kernels: PyTorch's default plan of BERT, lowered
# for an H200, has a peak 5.4% below the simulated one, and a plan simulated 4.2% lower came out 1.1% above it.
GPU_PEAK_MARGIN: Final = 0.06
# Of the time that the fastest plan gains on PyTorch's this share may be spent on a lower peak. Not all of it: the
# predictions of two plans of one model are off against each other by some percent (bench.costs).
TIME_SHARE: Final = 0.7
# How often the stretch between two vertices of the frontier is halved: sixteenths of the model, 0.25 s a time for 2,000
# nodes.
BISECTIONS: Final = 4
# Plans predicted to be slower than the chosen one by more than this are not worth compiling to be timed. A judgement:
# the predictions of two plans of one model are off against each other by some percent (bench.costs).
PROMISING: Final = 0.15
# Between two vertices plans are looked for that change from one to the other at each of these parts of the model. A
# judgement.
STRETCHES: Final = 4
# Under a budget plans are looked for at so many smaller ones, each a step of the budget below the last: near enough for
# the same speed, far enough for another plan. A judgement.
BUDGET_STEP: Final = 0.03
BUDGET_STEPS: Final = 6
# A random plan draws each price as 10 to the power of a number below this: far apart, so that plans differ.
RANDOM_DECADES: Final = 6


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan with what it costs; `estimate` is what a step of it takes under Inductor."""

    plan: Plan
    estimate: Estimate
    seconds: float
    saved_bytes: int
    fused: bool
    scratch: Mapping[fx.Node, int]
    certificate: Certificate | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """The plan as it will run."""
        if self.fused:
            return fused_memory.timeline(self.plan, self.estimate.lowering, self.scratch)
        return simulate(self.plan, lambda node: self.scratch.get(node, 0))

    @property
    def runs(self) -> tuple[tuple[fx.Node, ...], ...]:
        """What tells two plans apart: saved values, and the runs of forward and backward in order."""
        return self.plan.saved, self.plan.forward, self.plan.backward

    @property
    def peak_bytes(self) -> int:
        """Predicted peak, the way the plan will run."""
        return self.timeline.peak_bytes

    def fits_within(self, other: Candidate) -> bool:
        """Whether neither saved bytes nor peak exceed the other's, op by op, and under Inductor with a margin."""
        margin = FUSED_PEAK_MARGIN if self.plan.joint.device.type == "cpu" else GPU_PEAK_MARGIN
        return (
            self.saved_bytes <= other.saved_bytes
            and self._op_by_op_peak_bytes <= other._op_by_op_peak_bytes
            and self.fused_peak_bytes <= (1 - margin) * other.fused_peak_bytes
        )

    def runs_within(self, other: Candidate) -> bool:
        """Whether a step is predicted to take no more time under Inductor than the other's, and no more FLOPs.

        On a GPU, where traffic is what takes time, no more traffic and kernels either. On a CPU what bounds a kernel is
        often tanh or exp: saving their results moves more bytes and takes less time (GPT-2: 8% and 8%).
        """
        mine, theirs = self.estimate, other.estimate
        if mine.extern_flops > theirs.extern_flops or mine.step_seconds > theirs.step_seconds:
            return False
        return self.plan.joint.device.type == "cpu" or (
            mine.lowering.traffic_bytes <= theirs.lowering.traffic_bytes
            and mine.lowering.kernel_count <= theirs.lowering.kernel_count
        )

    @cached_property
    def _op_by_op_peak_bytes(self) -> int:
        return simulate(self.plan).peak_bytes

    @cached_property
    def fused_peak_bytes(self) -> int:
        """Predicted peak under Inductor."""
        if self.fused:
            return self.peak_bytes
        return fused_memory.timeline(self.plan, self.estimate.lowering, {}).peak_bytes


def has_alternatives(settings: Settings) -> bool:
    """Whether other plans keep what the settings ask for.

    None does where they ask for PyTorch's plan, a random one, the smallest peak, or the cut at weights of one's own.
    """
    if settings.partitioner == "torch" or settings.plan_seed is not None or settings.budget == "min":
        return False
    return settings.budget is not None or settings.weights_are_default()


@dataclass(frozen=True, eq=False)
class Planner:
    """Everything a plan is made from; `share`: of a step of several graphs what this one needs to know."""

    joint: JointGraph
    costs: Costs
    rules: Rules
    settings: Settings
    share: Share | None = None

    def choose(self) -> tuple[Candidate, Candidate]:
        """The plan the settings ask for, and PyTorch's default for comparison."""
        return self.chosen

    @cached_property
    def chosen(self) -> tuple[Candidate, Candidate]:
        """What `choose` gives, made once."""
        if self.settings.partitioner == "torch":
            return self.torchs, self.torchs
        if self.settings.plan_seed is not None:
            return self.random(self.settings.plan_seed), self.torchs
        if self.settings.budget is None:
            return self._default, self.torchs
        return self.within(), self.torchs

    def within(self) -> Candidate:
        """The plan for the budget of the settings: a peak, in bytes or as a fraction of PyTorch's default plan's."""
        plan = self.peaks.within(self.allowed_bytes) if self.allowed_bytes else self.peaks.smallest()
        return self.certified(plan)

    @cached_property
    def allowed_bytes(self) -> int:
        """The peak that the budget of the settings allows; 0: "min"."""
        budget = self.settings.budget if self.share is None else self.share.budget
        if not isinstance(budget, float):
            return budget if isinstance(budget, int) else 0
        memory = self.reference_memory
        return int(budget * (memory.peak_bytes if self.share is None else self.share.reference_bytes(memory)))

    @cached_property
    def reference_memory(self) -> Memory:
        """What the plan takes that fractions are of; as PyTorch would run it, which holds Inductor to no schedule."""
        plan = self.reference.plan
        if self.settings.inner == "inductor":
            return fused_memory.timeline(plan, fusion.predict(plan), self.scratch).memory
        return self.reference.timeline.memory

    def certified(self, plan: Plan) -> Candidate:
        """A plan for the budget of the settings, with what is known of how good it is."""
        return replace(self._priced(plan), certificate=self.peaks.certificate(plan, self.allowed_bytes))

    @cached_property
    def torchs(self) -> Candidate:
        """PyTorch's default plan, made once."""
        return self.torch_default()

    @cached_property
    def _obeying(self) -> Candidate:
        return self._obeying_the_rules(self.torchs)

    @cached_property
    def reference(self) -> Candidate:
        """What fractions are of: PyTorch's plan under our rules, which stays where it is when the default gets better.

        Where that is no plan at all, the default.
        """
        return self._obeying if why_invalid(self._obeying.plan, self.rules) is None else self._default

    @cached_property
    def _default(self) -> Candidate:
        return self.default(self._obeying)

    @cached_property
    def peaks(self) -> PeakPlanner:
        """What plans for a budget are made by."""
        default = self._default
        seeds = [default.plan, self._obeying.plan]
        if default.fused or self.share is not None:
            seeds.append(self.smallest().plan)
        return PeakPlanner(
            self.joint, self.costs, self.rules, self.settings, self.scratch, seeds, self.estimate_of, self.share
        )

    def promising(self, count: int, first: Candidate) -> list[Candidate]:
        """At most `count` different plans to compare by the clock: the first, then the fastest by prediction.

        The others keep the same promises as the first: without a budget no more saved bytes and no higher peak than
        PyTorch's default plan, which is among them; with one, a predicted peak within it. Only the first where nothing
        is left to choose (see `has_alternatives`), or where no plan is as small as the budget asks.
        """
        found = {first.runs: first}
        if count > 1 and has_alternatives(self.settings):
            others = self._no_larger_than_torchs() if self.settings.budget is None else self._within_budget(first)
            limit = (1 + PROMISING) * first.estimate.step_seconds
            near = [candidate for candidate in others if candidate.estimate.step_seconds <= limit]
            for candidate in sorted(near, key=lambda c: c.estimate.step_seconds):
                found.setdefault(candidate.runs, candidate)
        return list(found.values())[:count]

    def _no_larger_than_torchs(self) -> list[Candidate]:
        """PyTorch's plan, vertices of the ladder and plans between each two; those that fit within the first."""
        torchs, prices = self.reference, self.ladder()
        count = len(self.joint.nodes)
        places = [count * part // STRETCHES for part in range(1, STRETCHES)]
        cuts = [self._at(price) for price in prices]
        cuts += [self.cut(high, "cut", at, low) for low, high in itertools.pairwise(prices) for at in places]
        return [torchs, *(cut for cut in cuts if cut.fits_within(torchs))]

    def _within_budget(self, first: Candidate) -> list[Candidate]:
        """The plans for budgets a little smaller than the one allowed, the default plan and PyTorch's, where these fit.

        A smaller budget takes another plan, which recomputes more and may still be as fast.
        """
        planner, certificate = self.peaks, first.certificate
        assert certificate is not None
        allowed, smallest = certificate.budget_bytes, certificate.smallest_peak_bytes
        if not first.fused:
            smallest = max(smallest, planner.frontier.points[0].peak)
        limits = [int(allowed * (1 - BUDGET_STEP * step)) for step in range(1, BUDGET_STEPS + 1)]
        plans = [planner.within(limit) for limit in limits if limit >= smallest]
        seeds = [seed for seed in planner.seeds if why_invalid(seed, self.rules) is None]
        if first.peak_bytes > allowed:
            return []
        fitting = (plan for plan in (*plans, *seeds) if planner.peak_bytes(plan) <= allowed)
        return [replace(self._priced(plan), certificate=planner.certificate(plan, allowed)) for plan in fitting]

    # --- candidates ---------------------------------------------------------------------------------------

    @cached_property
    def network(self) -> FlowNetwork:
        """The flow network at the prices of the settings."""
        return build(self.joint, self.rules, self.costs.save_price, self.costs.recompute_price)

    @cached_property
    def _solver(self) -> CutSolver:
        return CutSolver(self.network)

    def cut(
        self, byte_price: int, solver: str = "cut", upto: int | None = None, byte_price_after: int = 0
    ) -> Candidate:
        """The cheapest plan when each saved byte costs so many femtoseconds more (`upto`: see CutSolver)."""
        cut = self._solver.minimum_cut(byte_price, upto, byte_price_after)
        return self.candidate([self.joint.nodes[position] for position in cut.saved()], solver)

    def candidate(self, saved: list[fx.Node], solver: str) -> Candidate:
        """A set of saved values with its schedule and its price."""
        return self._priced(make_plan(self.joint, saved, solver))

    def _priced(self, plan: Plan) -> Candidate:
        price = sum(self.costs.save_price(node) for node in plan.saved) + sum(
            self.costs.recompute_price(node) for node in plan.backward if node in plan.forward_set
        )
        count_bytes = sum(cost_model.saved_bytes(node) for node in plan.saved)
        fused = self.settings.inner == "inductor"
        seconds = price / cost_model.FEMTOSECONDS
        return Candidate(plan, self.estimate_of(plan), seconds, count_bytes, fused, self.scratch)

    def estimate_of(self, plan: Plan) -> Estimate:
        """What a step of a plan takes under Inductor; made once, so that its kernels are predicted once."""
        if plan not in self._estimates:
            self._estimates[plan] = Estimate(plan, self.costs)
        return self._estimates[plan]

    @cached_property
    def _estimates(self) -> dict[Plan, Estimate]:
        return {}

    @cached_property
    def scratch(self) -> dict[fx.Node, int]:
        """What each operator's kernel takes for itself, op by op; under Inductor those outside of generated code."""
        return learn_scratch_outside(self.joint) if self.settings.inner == "inductor" else learn_scratch(self.joint)

    def torch_default(self) -> Candidate:
        """What PyTorch's partitioner saves at its budget 1.0.

        Of a view the base is saved, whose memory it is; constants, which it keeps too, are made again.
        """
        saved = torch_internals.default_cut(
            self.joint.module, self.joint.num_fwd_outputs, self.joint.static_indices, cost_model.NOMINAL_SIZE
        )
        bases = [ops.view_base(node) for node in saved]
        # Of one seed of many the tensor of seeds is saved, as of a view its base.
        bases = [n.all_input_nodes[0] if n.target is torch_internals.LOOKUP_SEED else n for n in bases]
        return self.candidate([base for base in bases if ops.kind(base) is not ops.Kind.FACTORY], "torch")

    def _fastest_vertex(self, allowed: int) -> Candidate:
        """Where PyTorch's cut is no plan at all: the fastest vertex that saves no more bytes, else the fastest."""
        tried = [self.cut(price) for price in self.ladder()]
        return min([c for c in tried if c.saved_bytes <= allowed] or tried, key=lambda c: c.seconds)

    def _obeying_the_rules(self, candidate: Candidate) -> Candidate:
        """PyTorch's cut with the values saved too that our rules say are made once: it knows nothing of them."""
        plan, once = candidate.plan, self.rules.no_recompute | self.rules.unwise_recompute
        again = [n for n in plan.backward if n in plan.forward_set and n in once and n not in self.rules.no_save]
        return self.candidate([*plan.saved, *again], plan.solver) if again else candidate

    def ladder(self) -> list[int]:
        """Growing prices of a byte, in femtoseconds."""
        byte = cost_model.FEMTOSECONDS / self.costs.device.bytes_per_second
        return [round(multiple * byte) for multiple in PRICE_LADDER]

    # --- choices -------------------------------------------------------------------------------------------

    def default(self, torch_default: Candidate) -> Candidate:
        """The lowest peak that is predicted to be no slower than PyTorch's plan; with weights of one's own, the cut."""
        if not self.settings.weights_are_default():
            return self.cut(0)
        if why_invalid(torch_default.plan, self.rules) is not None:
            return self._fastest_vertex(torch_default.saved_bytes)
        prices = self.ladder()
        fastest, ours = self._at(prices[0]).estimate.step_seconds, torch_default.estimate.step_seconds
        allowed = min(ours, fastest + TIME_SHARE * (ours - fastest))

        def is_too_slow(found: Candidate) -> bool:
            return found.estimate.step_seconds > allowed or not found.runs_within(torch_default)

        # A higher price of bytes never makes a plan faster: the dearest one at which it is still fast enough.
        count = bisect.bisect(prices, False, key=lambda price: is_too_slow(self._at(price)))
        tried = [self._at(price) for price in prices[:count]]
        if 0 < count < len(prices):
            tried += self._between(prices[count - 1], prices[count], is_too_slow)
        fitting = [found for found in tried if found.fits_within(torch_default) and not is_too_slow(found)]
        return min([*fitting, torch_default], key=lambda found: (found.fused_peak_bytes, found.estimate.step_seconds))

    @cached_property
    def _cuts(self) -> dict[int, Candidate]:
        return {}

    def _at(self, byte_price: int) -> Candidate:
        if byte_price not in self._cuts:
            self._cuts[byte_price] = self.cut(byte_price)
        return self._cuts[byte_price]

    def _between(self, low: int, high: int, gives_up_too_much: Callable[[Candidate], bool]) -> Iterator[Candidate]:
        """Plans between two neighbours of the frontier, which for a model of equal layers lie far apart.

        The early values pay the high price, the late ones the low: what is recomputed in one stretch is then the
        beginning of the model, when the saved values of the rest are gone.
        """
        first, last = 0, len(self.joint.nodes)
        for _ in range(BISECTIONS):
            middle = (first + last) // 2
            candidate = self.cut(high, "cut", middle, low)
            yield candidate
            first, last = (first, middle) if gives_up_too_much(candidate) else (middle, last)

    def smallest(self) -> Candidate:
        """The plan that saves fewest bytes (its peak need not be low): among equals the fastest."""
        total = 1 + sum(self.costs.recompute_price(node) + self.costs.save_price(node) for node in self.joint.nodes)
        return self.cut(total, "smallest")

    def random(self, seed: int) -> Candidate:
        """A valid plan drawn at random: the minimum cut at random prices. The same seed gives the same plan."""
        generator = random.Random(seed)
        prices = {
            node: [round(10 ** generator.uniform(0, RANDOM_DECADES)) for _ in range(2)] for node in self.joint.nodes
        }
        # What a solver leaves out as unwise is valid all the same, and so is worth testing.
        rules = replace(self.rules, unwise_save={})
        network = build(self.joint, rules, lambda n: prices[n][0], lambda n: prices[n][1])
        cut = CutSolver(network).minimum_cut()
        return self.candidate([self.joint.nodes[position] for position in cut.saved()], "random")
