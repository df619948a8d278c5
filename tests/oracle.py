"""Exact optima of small rematerialization problems, to judge planners by, and random problems to judge them on.

Two ways that share nothing but the `Problem`:
- `exhaustive_optimum` searches all sequences, where about ten operators may run again;
- `multi_level_optimum` and `single_level_optimum` solve an integer program over a part of the sequences, for more.

**The program.** A sequence is a choice among slots that are laid out beforehand: slot p runs one given operator
(x[p] = 1) or nothing. The layout has the stages of Checkmate (Jain et al., MLSys 2020, section 4.2): one for each first
run of the baseline, before which everything that ran earlier may run once more. Instead of Checkmate's S, FREE and U
(its equations 1 to 6) there is one chain of retentions per value, a discrete form of the retention intervals of
Moccasin (Bartan et al., ICML 2023, section 2): for consecutive slots p < q that read or write the value v, kept[v, p]
says that v is alive after p until q.

    q writes v:  kept[v, p] + x[q] <= 1     kept[v, q] <= kept[v, p] + x[q]
    q reads v:   x[q] <= kept[v, p]         kept[v, q] <= kept[v, p]

Alive while q runs is then kept[v, p], plus x[q] where q writes v; one row per slot keeps the bytes of that within the
budget. For integral x the least solution is the liveness that `Problem.profile` counts, so that only x need be
integral, and no product has to be linearized.

**What the layout leaves out.** First runs that the boundary needs come in the order of the baseline, and an operator
runs at most once in a stage, in the order of the baseline. These optima are therefore never below that of
`exhaustive_optimum`, and equal to it on chains, which leave no choice of order.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from remat.problem import Problem

# HiGHS accepts what is this close to integral or feasible (its default mip_feasibility_tolerance).
TOLERANCE = 1e-6
# Memory rows are scaled so that no budget is larger than this: 1e-6 of a row is then 1e-10 of the budget, and four
# bytes of 10 GiB are 4e-6, well above the 1e-9 that HiGHS takes for zero.
BUDGET_UNITS = 10_000
# Programs solved in turn, each without what fitted the budget only by rounding (at most 3 cuts
# were seen to be needed, for sizes of gigabytes and single bytes).
ATTEMPTS = 20


@dataclass(frozen=True)
class Optimum:
    """The cheapest sequence found within a budget, and what is known of cheaper ones among those considered.

    cost: its recompute cost, exact; None if none was found.
    sequence: the sequence itself, legal and within the budget; empty if none was found.
    proven: there is none cheaper; where none was found, there is none at all.
    bound: there is none below this cost; None where there is none at all.
    """

    cost: int | None
    sequence: tuple[int, ...]
    proven: bool
    bound: int | None


def multi_level_optimum(problem: Problem, budget: int, seconds: float = 60.0) -> Optimum:
    """The least recompute cost within a budget of peak bytes, over the sequences of `staged_layout`."""
    return _optimum(problem, budget, seconds, staged_layout(problem))


def single_level_optimum(problem: Problem, budget: int, seconds: float = 60.0) -> Optimum:
    """The same where every operator runs at most once before the boundary and once after; without one, at most twice.

    The sequences of `two_run_layout`, all of which `staged_layout` has as well: never below `multi_level_optimum`.
    """
    return _optimum(problem, budget, seconds, two_run_layout(problem))


# --- the slots of a program ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The slots that a sequence may use, in the order in which they run.

    operators: the operator of each slot.
    always: slots that every sequence uses.
    limits: (slots, least, most): how many of these a sequence uses.
    """

    operators: tuple[int, ...]
    always: frozenset[int]
    limits: tuple[tuple[tuple[int, ...], int, int], ...]


def staged_layout(problem: Problem) -> Layout:
    """One stage for each operator that has its place in the baseline, the anchor, which runs last in it.

    Before the anchor, all that ran in earlier stages may run again, and what has no place may run.
    """
    operators = _staged(problem)
    slots = _useful_slots(problem, operators)
    return _layout(problem, [operators[slot] for slot in slots], ())


def two_run_layout(problem: Problem) -> Layout:
    """The baseline up to the boundary, then one stage for each operator that runs once: there the others run again.

    What has no place in the baseline may run in any stage, and in the baseline next after what makes or reads one of
    its inputs (when running it may free that), or just before the boundary.
    """
    if problem.boundary is None:
        operators = _staged(problem)
        slots = _useful_slots(problem, operators)
        return _layout(problem, [operators[slot] for slot in slots], (range(len(slots)),), most=2)
    anchors, free = _anchors(problem), _movable(problem)
    late = [operator for operator in free if operator not in anchors]
    fixed, near = set(problem.fixed), _near(problem, late)
    at = problem.order.index(problem.boundary) + 1
    operators = []
    for anchor in problem.order[:at]:
        if anchor in anchors:
            around = set(operators[-1:]) if anchor != problem.boundary else set(late)
            operators += [*(o for o in late if not around.isdisjoint(near[o])), anchor]
    middle = len(operators)
    operators += [o for anchor in problem.order[at:] if anchor in fixed for o in (*free, anchor)] + free
    slots = _useful_slots(problem, operators)
    half = sum(slot < middle for slot in slots)
    return _layout(problem, [operators[slot] for slot in slots], (range(half), range(half, len(slots))))


def _staged(problem: Problem) -> list[int]:
    anchors, free = _anchors(problem), _movable(problem)
    operators: list[int] = []
    earlier: set[int] = set()
    for operator in problem.order:
        if operator in anchors:
            operators += [other for other in free if other in earlier or other not in anchors]
            operators.append(operator)
            earlier.add(operator)
    return operators + free


def _anchors(problem: Problem) -> set[int]:
    """Operators that have their place in the baseline: those that keep their order, and what the boundary needs."""
    if problem.boundary is None:
        return set(problem.order)
    found = {problem.boundary}
    pending = [problem.boundary]
    while pending:
        makers = {problem.producer[value] for value in problem.reads[pending.pop()]} - found
        found |= makers
        pending += makers
    return found | set(problem.fixed)


def _near(problem: Problem, late: Sequence[int]) -> dict[int, set[int]]:
    """For operators without a place: itself, and what makes or reads its inputs, or those of others that it needs."""
    near: dict[int, set[int]] = {}
    for operator in late:
        near[operator] = {operator}
        for value in problem.reads[operator]:
            maker = problem.producer[value]
            near[operator] |= {maker, *problem.readers[value]} | near.get(maker, set())
    return near


def _movable(problem: Problem) -> list[int]:
    """Operators that may run elsewhere than at a place of the baseline: again, or for the first time."""
    anchors, fixed = _anchors(problem), set(problem.fixed)
    gone = fixed | (anchors & problem.once)
    return [operator for operator in problem.order if operator not in gone]


def _useful_slots(problem: Problem, operators: Sequence[int]) -> list[int]:
    """The slots that can be used (what they read can be there) and can be of use (what they write can be read)."""
    made: set[int] = set()
    possible = []
    for slot, operator in enumerate(operators):
        if made.issuperset(problem.reads[operator]):
            possible.append(slot)
            made.update(problem.writes[operator])
    wanted: set[int] = set()
    useful = []
    for slot in reversed(possible):
        operator = operators[slot]
        # A reader has to run, so that what runs after all its readers has run before.
        unread = not any(problem.readers[value] for value in problem.writes[operator])
        if unread or not wanted.isdisjoint(problem.writes[operator]):
            useful.append(slot)
            wanted.update(problem.reads[operator])
    return useful[::-1]


def _layout(problem: Problem, operators: Sequence[int], parts: Iterable[range], most: int = 1) -> Layout:
    """A layout where each operator runs at least once, and at most `most` times in each part (anywhere in between)."""
    slots: list[list[int]] = [[] for _ in problem.reads]
    for slot, operator in enumerate(operators):
        slots[operator].append(slot)
    anchors = _anchors(problem)
    limits = []
    for operator, own in enumerate(slots):
        limits.append((tuple(own), 1, len(own) if _repeats(problem, operator) else 1))
        limits += [(tuple(slot for slot in own if slot in part), 0, most) for part in parts]
    binding = tuple(limit for limit in limits if limit[1] or len(limit[0]) > limit[2])
    return Layout(tuple(operators), frozenset(slots[operator][0] for operator in anchors), binding)


def _repeats(problem: Problem, operator: int) -> bool:
    """Whether it may be of use to run an operator again: not where all that it writes is there anyway, or unread."""
    writes = problem.writes[operator]
    if operator in problem.once:
        return False
    there = problem.held - problem.unsavable
    return any(value not in there and problem.readers[value] for value in writes)


# --- the program ---------------------------------------------------------------------------------------------------

Terms = Sequence[tuple[int, float]]


@dataclass
class _Program:
    """Columns between 0 and 1 and the rows on them, collected one by one, for one layout.

    runs: the column of each slot. memory: bytes of the columns that are alive in each slot.
    """

    problem: Problem
    layout: Layout
    runs: list[int] = field(default_factory=list)
    memory: list[list[tuple[int, int]]] = field(default_factory=list)
    costs: list[int] = field(default_factory=list)
    lowest: list[int] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    row_bounds: list[tuple[float, float]] = field(default_factory=list)

    def column(self, cost: int = 0, least: int = 0) -> int:
        self.costs.append(cost)
        self.lowest.append(least)
        return len(self.costs) - 1

    def row(self, low: float, terms: Terms, high: float) -> None:
        self.entries += [(len(self.row_bounds), column, factor) for column, factor in terms]
        self.row_bounds.append((low, high))

    def at_most(self, column: int, terms: Terms) -> None:
        """column <= terms."""
        self.row(-math.inf, [(column, 1), *_negative(terms)], 0)

    def at_least(self, column: int, terms: Terms, above: int = 0) -> None:
        """column >= terms + above."""
        self.row(above, [(column, 1), *_negative(terms)], math.inf)

    def alive(self, value: int, terms: Terms, slots: Iterable[int]) -> None:
        for slot in slots:
            self.memory[slot] += [(column, self.problem.size[value]) for column, _ in terms]

    def solve(self, seconds: float) -> Any:
        rows, columns, factors = zip(*self.entries, strict=True)
        shape = (len(self.row_bounds), len(self.costs))
        low, high = np.array(self.row_bounds, dtype=float).T
        # Only x has to be integral, but where budgets are tight HiGHS needs its cuts on the others: 20 layers were
        # proven in 9 s, and with x alone not in 12. Where they are not it takes up to four seconds more.
        integral = np.ones(len(self.costs))
        return milp(
            c=np.array(self.costs, dtype=float),
            integrality=integral,
            bounds=Bounds(np.array(self.lowest, dtype=float), np.ones(len(self.costs))),
            constraints=LinearConstraint(csr_array((factors, (rows, columns)), shape=shape), low, high),
            options={"time_limit": max(seconds, 0.0), "mip_rel_gap": 0.0},
        )


def _negative(terms: Terms) -> Terms:
    return [(column, -factor) for column, factor in terms]


def _program(problem: Problem, budget: int, layout: Layout, cost_unit: int) -> _Program:
    program = _Program(problem, layout)
    for slot, operator in enumerate(layout.operators):
        program.runs.append(program.column(problem.cost[operator] // cost_unit, least=slot in layout.always))
        program.memory.append([(program.runs[slot], problem.scratch[operator])])
    for slots, least, most in layout.limits:
        program.row(least, [(program.runs[slot], 1) for slot in slots], most)
    for value in range(len(problem.size)):
        if value in problem.held:
            _held_lifetime(program, value)
        else:
            _lifetime(program, value)
    unit = math.gcd(*problem.size, *problem.scratch) or 1
    scale = min(1.0, BUDGET_UNITS / max(1, budget // unit))
    for memory in program.memory:
        terms = [(column, scale * (bytes_ // unit)) for column, bytes_ in memory if bytes_]
        program.row(-math.inf, terms, scale * (budget // unit))
    return program


def _lifetime(program: _Program, value: int) -> None:
    """When a value may be read, and the slots that it is alive in: the rows of this file's head."""
    kept: Terms = []
    for slot, writes, until in _events(program, value):
        run = program.runs[slot]
        if writes:
            program.alive(value, [(run, 1)], [slot])
            kept = [*kept, (run, 1)]
            program.row(0, kept, 1)  # keeping what is replaced is of no use
        else:
            program.at_most(run, kept)
        kept = _kept(program, value, kept, slot, until)


def _held_lifetime(program: _Program, value: int) -> None:
    """The same for a held value: it is there once `made`; where that version is not read any more, a later one is."""
    repeats = _repeats(program.problem, program.problem.producer[value])
    made: Terms = []
    again: Terms = []
    kept: Terms = []
    for slot, writes, until in _events(program, value):
        run = program.runs[slot]
        if writes:
            if made and repeats:
                newer = program.column()
                program.at_least(newer, [(run, 1), *made], above=-1)
                program.at_most(newer, [(run, 1)])
                program.alive(value, [(newer, 1)], [slot])
                kept = [*kept, (newer, 1)]
                program.row(0, kept, 1)
                again = _so_far(program, again, newer)
            made = _so_far(program, made, run, least=slot in program.layout.always)
        else:
            program.at_most(run, made)
            if again:
                program.row(-math.inf, [(run, 1), *again, *_negative(kept)], 1)
        if made and _saved(program, value, slot, until):
            again = _so_far(program, again, made[0][0])  # the first version stays, but may not be read
        program.alive(value, made, range(slot, until))
        kept = _kept(program, value, kept, slot, until)


def _so_far(program: _Program, before: Terms, run: int, least: int = 0) -> Terms:
    """A column for: this one is 1, or that of before."""
    column = program.column(least=least)
    program.at_least(column, [(run, 1)])
    if before:
        program.at_least(column, before)
    program.at_most(column, [(run, 1), *before])
    return [(column, 1)]


def _kept(program: _Program, value: int, source: Terms, slot: int, until: int) -> Terms:
    """A column for: what is alive in a slot stays so until the next event; none where it may not or need not."""
    if not source or until == len(program.runs) or _saved(program, value, slot, until):
        return []
    column = program.column()
    program.at_most(column, source)
    program.alive(value, [(column, 1)], range(slot + 1, until + 1))
    return [(column, 1)]


def _events(program: _Program, value: int) -> Iterator[tuple[int, bool, int]]:
    """(slot, whether it writes the value, next such slot or the end) of each slot that reads or writes it."""
    problem, operators = program.problem, program.layout.operators
    touching = {problem.producer[value], *problem.readers[value]}
    events = [slot for slot, operator in enumerate(operators) if operator in touching]
    for slot, until in zip(events, [*events[1:], len(operators)], strict=True):
        yield slot, operators[slot] == problem.producer[value], until


def _saved(program: _Program, value: int, slot: int, until: int) -> bool:
    """Whether an unsavable value that is alive after a slot until another would be saved by that."""
    problem = program.problem
    if value not in problem.unsavable or problem.boundary is None:
        return False
    at = program.layout.operators.index(problem.boundary)
    # What the boundary itself makes is not saved; what it reads may be alive in it, and no longer.
    return slot < at < until or (slot == at and problem.producer[value] != problem.boundary)


def _optimum(problem: Problem, budget: int, seconds: float, layout: Layout) -> Optimum:
    """Solves, and judges what was found by the problem itself; what fits only by rounding is cut off."""
    deadline = time.monotonic() + seconds
    cost_unit = math.gcd(*problem.cost) or 1
    program = _program(problem, budget, layout, cost_unit)
    bound = 0
    for _ in range(ATTEMPTS):
        result = program.solve(deadline - time.monotonic())
        if result.status == 2:
            return Optimum(None, (), True, None)
        bound = max(bound, _integer_bound(result.mip_dual_bound) * cost_unit - problem.baseline_cost)
        if result.x is None:
            break
        used = result.x > 0.5
        runs = zip(layout.operators, used[program.runs], strict=True)
        sequence = tuple(operator for operator, run in runs if run)
        reason = problem.why_illegal(sequence)
        assert reason is None, reason
        if problem.peak(sequence) <= budget:
            cost = problem.recompute_cost(sequence)
            return Optimum(cost, sequence, cost == bound, bound)
        _cut_off(program, budget, used)
    return Optimum(None, (), False, bound)


def _cut_off(program: _Program, budget: int, used: Any) -> None:
    """Cover inequalities: of values that exceed the budget together, one is not alive."""
    cut = False
    for memory in program.memory:
        sizes: dict[int, int] = {}
        for column, bytes_ in memory:
            if used[column]:
                sizes[column] = sizes.get(column, 0) + int(bytes_)
        if sum(sizes.values()) > budget:
            largest = sorted(sizes, key=lambda column: (-sizes[column], column))
            count = next(n for n in range(len(sizes) + 1) if sum(sizes[column] for column in largest[:n]) > budget)
            program.row(-math.inf, [(column, 1) for column in largest[:count]], count - 1)
            cut = True
    assert cut, "the program counts less memory than the problem"


def _integer_bound(dual: float | None) -> int:
    if dual is None or not math.isfinite(dual):
        return 0
    return math.ceil(dual - TOLERANCE * max(1.0, abs(dual)))


# --- all sequences -------------------------------------------------------------------------------------------------

# Sets as bit masks: operators that ran; values whose newest version is alive, first versions of held ones aside; held
# values whose first version may not be read any more, because there is a newer one, or because it would be saved.
State = tuple[int, int, int]


def exhaustive_optimum(problem: Problem, budget: int, states: int = 1_000_000) -> Optimum:
    """The least recompute cost over all sequences: Dijkstra's algorithm on what ran and what is alive.

    More than `states` of them is an error of the test. Nothing is assumed but that keeping less is of use only where
    some operator does not fit, and running again what is there never.
    """
    search = _Search(problem, budget)
    start: State = (0, 0, 0)
    costs = {start: 0}
    came: dict[State, tuple[State, int | None]] = {}
    queue = [(0, start)]
    while queue:
        cost, state = heapq.heappop(queue)
        if cost > costs[state]:
            continue
        if state[0] == search.everything:
            return Optimum(cost, _steps(came, state), True, cost)
        for price, operator, after in search.moves(state):
            if cost + price < costs.get(after, math.inf):
                costs[after] = cost + price
                came[after] = (state, operator)
                heapq.heappush(queue, (cost + price, after))
        assert len(costs) <= states, f"more than {states} states: take a smaller problem"
    return Optimum(None, (), True, None)


def _steps(came: dict[State, tuple[State, int | None]], state: State) -> tuple[int, ...]:
    steps = []
    while state in came:
        state, operator = came[state]
        if operator is not None:
            steps.append(operator)
    return tuple(reversed(steps))


def _mask(items: Iterable[int]) -> int:
    return sum(1 << item for item in set(items))


def _members(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class _Search:
    """The moves of `exhaustive_optimum`."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem, self.budget = problem, budget
        self.reads = [_mask(values) for values in problem.reads]
        self.writes = [_mask(values) for values in problem.writes]
        self.held, self.unsavable = _mask(problem.held), _mask(problem.unsavable)
        self.everything = _mask(range(len(problem.reads)))
        self.before = {operator: _mask(problem.fixed[:place]) for place, operator in enumerate(problem.fixed)}
        self.remade = _mask(value for value, maker in enumerate(problem.producer) if maker not in problem.once)
        self.readers = [_mask(users) for users in problem.readers]
        # Values that nothing can read any more after all their readers have run.
        self.read_once = [value for value, users in enumerate(problem.readers) if problem.once.issuperset(users)]

    def moves(self, state: State) -> Iterator[tuple[int, int | None, State]]:
        """(price, operator that runs, or None where a value is dropped, what comes of it)."""
        ran, live, newer = state
        made = _mask(value for operator in _members(ran) for value in self.problem.writes[operator])
        readable = live | (self.held & made & ~newer)
        short = False
        for operator, (reads, writes) in enumerate(zip(self.reads, self.writes, strict=True)):
            again = bool(ran >> operator & 1)
            barred = (again and operator in self.problem.once) or self.before.get(operator, 0) & ~ran
            if barred or reads & ~readable or (again and not writes & ~readable):
                continue
            after = self._run(state, made, operator)
            if after is None:
                short = True
            else:
                yield (self.problem.cost[operator] if again else 0), operator, after
        if short:
            for value in _members(live):
                # What cannot be made again and is still needed has to stay.
                if self.remade >> value & 1 or not self.readers[value] & ~ran:
                    yield 0, None, (ran, live & ~(1 << value), newer)

    def _run(self, state: State, made: int, operator: int) -> State | None:
        ran, live, newer = state
        writes = self.writes[operator]
        again = bool(ran >> operator & 1)
        live |= writes if again else writes & ~self.held
        ran |= 1 << operator
        if self._bytes(live) + self._bytes((made | writes) & self.held) + self.problem.scratch[operator] > self.budget:
            return None
        if operator == self.problem.boundary:
            live &= ~self.unsavable | writes
            newer |= made & self.held & self.unsavable
        for value in self.read_once:
            if not self.readers[value] & ~ran:
                live &= ~(1 << value)
        return ran, live, newer | (writes & self.held if again else 0)

    def _bytes(self, values: int) -> int:
        return sum(self.problem.size[value] for value in _members(values))


# --- problems ------------------------------------------------------------------------------------------------------


def chain_problem(layers: int) -> Problem:
    """A chain of equal layers, whose backward reads each layer's input: everything costs 1 and takes 1 byte."""
    reads: list[tuple[int, ...]] = [(layer - 1,) if layer else () for layer in range(layers)]
    reads.append((layers - 1,))
    for layer in reversed(range(layers)):
        reads.append((layer - 1, len(reads) - 1) if layer else (len(reads) - 1,))
    ones, operators = (1,) * len(reads), range(len(reads))
    return Problem(
        reads=tuple(reads),
        writes=tuple((operator,) for operator in operators),
        cost=ones,
        size=ones,
        scratch=(0,) * len(reads),
        order=tuple(operators),
        once=frozenset(range(layers, len(reads))),
        boundary=layers,
    )


@dataclass
class _Draft:
    """A problem in the making: operators in the order of the baseline, with sizes and costs drawn."""

    draw: random.Random
    reads: list[tuple[int, ...]] = field(default_factory=list)
    writes: list[tuple[int, ...]] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    cost: list[int] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)

    def add(self, reads: Collection[int], values: int = 1) -> int:
        first = len(self.size)
        self.reads.append(tuple(sorted(set(reads))))
        self.writes.append(tuple(range(first, first + values)))
        self.size += [self.draw.randint(1, 8) for _ in range(values)]
        self.cost.append(self.draw.randint(0, 10))
        self.scratch.append(self.draw.choice((0, 0, 0, 1, 2, 4)))
        return len(self.reads) - 1

    def problem(self, once: Iterable[int], held: Iterable[int], boundary: int, unsavable: Iterable[int]) -> Problem:
        return Problem(
            reads=tuple(self.reads),
            writes=tuple(self.writes),
            cost=tuple(self.cost),
            size=tuple(self.size),
            scratch=tuple(self.scratch),
            order=tuple(range(len(self.reads))),
            once=frozenset(once),
            held=frozenset(held),
            boundary=boundary,
            unsavable=frozenset(unsavable),
        )


def random_problem(seed: int, layers: int) -> Problem:
    """A small training step: `layers` forward operators, the boundary, and a backward operator for each of them.

    Forward operators read one or two of the last values, write one or two, and rarely may run only once; backward
    operators read the gradient before them and values of their layer, or a mask of those that is made in the backward
    and may be made anywhere; some write a parameter's gradient. The first value of the last layer is the output.
    """
    draft = _Draft(random.Random(f"{seed} of {layers}"))
    draw = draft.draw
    inputs = [_add_forward(draft, layer) for layer in range(layers)]
    once = {layer for layer in range(layers) if draw.random() < 0.06}
    forward = range(len(draft.size))
    held = {draft.writes[layers - 1][0]}
    if draw.random() < 0.3:
        held.add(draw.choice(forward))
    again = {value for layer in range(layers) if layer not in once for value in draft.writes[layer]} - held
    unsavable = {draw.choice(sorted(again))} if again and draw.random() < 0.3 else set()
    boundary = draft.add(draft.writes[layers - 1][:1])
    once.add(boundary)
    gradient = draft.writes[boundary][0]
    for layer in reversed(range(layers)):
        needs = set(inputs[layer]) | set(draft.writes[layer] if draw.random() < 0.3 else ())
        if needs and draw.random() < 0.2:
            needs = set(draft.writes[draft.add(needs)])
        backward = draft.add({gradient, *needs}, 2 if draw.random() < 0.25 else 1)
        once.add(backward)
        gradient, *parameters = draft.writes[backward]
        held.update(parameters)
    return draft.problem(once, held | {gradient}, boundary, unsavable)


def _add_forward(draft: _Draft, layer: int) -> list[int]:
    """One more forward operator; what it reads."""
    draw = draft.draw
    recent = [value for earlier in range(max(0, layer - 3), layer) for value in draft.writes[earlier]]
    inputs = draw.sample(recent, min(len(recent), draw.choice((1, 1, 2))))
    if layer and not set(inputs) & set(draft.writes[layer - 1]) and draw.random() < 0.7:
        inputs[0] = draw.choice(draft.writes[layer - 1])
    draft.add(inputs, draw.choice((1, 1, 1, 2)))
    return inputs
