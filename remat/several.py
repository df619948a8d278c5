"""One budget for a step of several graphs, as graph breaks make them: what each graph may take beside the others.

A step calls graphs in order, and their backwards in reverse. While one runs, those called before it hold their outputs
and saved values, and those called after it have left the gradients of their parameters. So the peak of the step is

    max over calls c of  peak(c) + sum of held(b) for b before c + sum of gradients(a) for a after c

where peak(c) is that of c's forward and backward alone. All of it is known from each graph's plan by itself; `settle`
chooses the plans together, and a `Share` tells one graph what that leaves to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

# Choices that `settle` tries before it takes the best combination so far. Of random graphs with up to 20 plans each, 3
# took at most 250 evaluations and 6 took 1,200; some of 12, and all of 40, reached this limit, in 0.4 s at most.
MOST_TRIED: Final = 20_000


class Memory(NamedTuple):
    """What a graph takes under one plan, in bytes: its peak alone, and what it holds from forward to backward."""

    peak_bytes: int
    held_bytes: int


class Choice(NamedTuple):
    """A plan that a graph could have: what it takes, and the seconds of a step of this graph."""

    memory: Memory
    seconds: float


class Moment(NamedTuple):
    """A moment of the step: bytes that the others have, and how often a graph's own peak and holding come on top."""

    bytes: int
    peaks: int
    holdings: int

    def peak_bytes(self, memory: Memory) -> int:
        """The bytes alive at this moment."""
        return self.bytes + self.peaks * memory.peak_bytes + self.holdings * memory.held_bytes


@dataclass(frozen=True)
class Share:
    """What one graph needs to know of the step that it is a part of.

    budget: of the whole step: bytes, a fraction of the peak that it has under PyTorch's plans, or "min". moments: of
    the step, those that cannot be the highest left out; `references`: the same under PyTorch's plans. graphs: how many
    calls the step has; 0: not known yet.
    """

    budget: int | float | str
    moments: tuple[Moment, ...]
    references: tuple[Moment, ...]
    graphs: int = 0

    def peak_bytes(self, memory: Memory) -> int:
        """The peak of the step if this graph takes so much."""
        return max(moment.peak_bytes(memory) for moment in self.moments)

    def reference_bytes(self, memory: Memory) -> int:
        """The peak of the step under PyTorch's plans, of which this graph's takes so much."""
        return max(moment.peak_bytes(memory) for moment in self.references)

    def left_bytes(self, budget_bytes: int) -> int:
        """What a budget for the step leaves to the peak of this graph alone, if it holds nothing."""
        return max(0, min(budget_bytes - moment.bytes for moment in self.moments if moment.peaks))


def before_others() -> Share:
    """What a graph is planned by that others will follow of which nothing is known: as if one like it did.

    Whatever the budget, little is held, or nothing would be left to those that follow.
    """
    return Share("min", (Moment(0, 1, 1),), (Moment(0, 1, 1),))


@dataclass(frozen=True)
class Member:
    """A graph of a step: its plan's memory and that of PyTorch's plan, its parameters' gradients, its choices."""

    memory: Memory
    reference: Memory
    gradient_bytes: int
    choices: tuple[Choice, ...]


# A step: the graphs that it calls, by number, in order.
Chain = tuple[int, ...]


def share_of(graph: int, chains: Sequence[Chain], members: Mapping[int, Member], budget: int | float | str) -> Share:
    """What is left to one graph by the present plans of the others; its own may be unknown still."""
    gradients = {number: member.gradient_bytes for number, member in members.items()}
    mine = {number: member.memory for number, member in members.items()}
    theirs = {number: member.reference for number, member in members.items()}
    return Share(
        budget,
        tuple(_highest(moment for chain in chains for moment in _moments(chain, mine, gradients, graph))),
        tuple(_highest(moment for chain in chains for moment in _moments(chain, theirs, gradients, graph))),
        max(map(len, chains)),
    )


def step_peak_bytes(chain: Chain, memories: Mapping[int, Memory], gradients: Mapping[int, int]) -> int:
    """The peak of a step; see the head of this file."""
    return max(moment.bytes for moment in _moments(chain, memories, gradients, None))


def _moments(
    chain: Chain, memories: Mapping[int, Memory], gradients: Mapping[int, int], apart: int | None
) -> Iterable[Moment]:
    """Each call's moment; what the graph `apart` takes is left out and counted."""
    before, own = 0, 0
    after = sum(gradients.get(number, 0) for number in chain)
    for number in chain:
        after -= gradients.get(number, 0)
        if number == apart:
            yield Moment(before + after, 1, own)
            own += 1
        else:
            yield Moment(before + after + memories[number].peak_bytes, 0, own)
            before += memories[number].held_bytes


def _highest(moments: Iterable[Moment]) -> list[Moment]:
    found: dict[tuple[int, int], int] = {}
    for moment in moments:
        key = moment.peaks, moment.holdings
        found[key] = max(found.get(key, 0), moment.bytes)
    return [Moment(count, *key) for key, count in sorted(found.items())]


# --- choosing together ------------------------------------------------------------------------------------------


def settle(chains: Sequence[Chain], members: Mapping[int, Member], budget: int | float | str) -> dict[int, Choice]:
    """The plans of least time with which every step keeps the budget; where none do, those of the smallest peak.

    Branch and bound over the graphs' choices, the fastest first: a partial choice is given up where even the smallest
    peak and holding of the graphs still open, or their least times, are no better than the best found.
    """
    numbers = list(dict.fromkeys(number for chain in chains for number in chain))
    gradients = {number: members[number].gradient_bytes for number in numbers}
    calls = {number: max(chain.count(number) for chain in chains) for number in numbers}
    choices = {number: sorted(members[number].choices, key=lambda choice: choice.seconds) for number in numbers}
    allowed = budget_bytes(chains, members, budget)
    memories = {number: _least(choices[number]) for number in numbers}
    seconds = {number: calls[number] * choices[number][0].seconds for number in numbers}
    tried = 0
    best: tuple[tuple[int, float], dict[int, Choice]] | None = None
    chosen: dict[int, Choice] = {}

    def bound() -> tuple[int, float]:
        peak = max(step_peak_bytes(chain, memories, gradients) for chain in chains)
        return max(0, peak - allowed), sum(seconds.values())

    def descend(place: int) -> None:
        nonlocal best, tried
        if place == len(numbers):
            best = bound(), dict(chosen)
            return
        number = numbers[place]
        saved = memories[number], seconds[number]
        for choice in choices[number]:
            tried += 1
            if tried > MOST_TRIED and best is not None:
                break
            memories[number], seconds[number] = choice.memory, calls[number] * choice.seconds
            if best is None or bound() < best[0]:
                chosen[number] = choice
                descend(place + 1)
        memories[number], seconds[number] = saved

    descend(0)
    assert best is not None
    return best[1]


def budget_bytes(chains: Sequence[Chain], members: Mapping[int, Member], budget: int | float | str) -> int:
    """A budget in bytes; 0: "min"."""
    if not isinstance(budget, float):
        return budget if isinstance(budget, int) else 0
    memories = {number: member.reference for number, member in members.items()}
    gradients = {number: member.gradient_bytes for number, member in members.items()}
    return int(budget * max(step_peak_bytes(chain, memories, gradients) for chain in chains))


def _least(choices: Sequence[Choice]) -> Memory:
    return Memory(
        min(choice.memory.peak_bytes for choice in choices), min(choice.memory.held_bytes for choice in choices)
    )
