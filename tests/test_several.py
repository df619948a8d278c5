"""Steps of several graphs: one budget for all of them, proved by brute force and by what is measured."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from bench import memory
from remat import auto, several, stepwise
from remat.errors import BudgetUnreachable, RematWarning
from remat.several import Chain, Choice, Member, Memory, settle, share_of, step_peak_bytes

# --- what several graphs take ------------------------------------------------------------------------------------


def played(chain: Chain, memories: dict[int, Memory], gradients: dict[int, int]) -> int:
    """The peak of a step, moment by moment."""
    alive = peak = 0
    for number in chain:
        peak = max(peak, alive + memories[number].peak_bytes)
        alive += memories[number].held_bytes
    for number in reversed(chain):
        alive -= memories[number].held_bytes
        peak = max(peak, alive + memories[number].peak_bytes)
        alive += gradients[number]
    return peak


def drawn(seed: int, graphs: int, most_choices: int = 4) -> tuple[list[Chain], dict[int, Member]]:
    draw = random.Random(seed)

    def memory_() -> Memory:
        held = draw.randrange(20)
        return Memory(held + draw.randrange(30), held)

    members = {}
    for number in range(graphs):
        choices = [Choice(memory_(), float(draw.randrange(9))) for _ in range(draw.randint(1, most_choices))]
        members[number] = Member(choices[0].memory, memory_(), draw.randrange(3), tuple(choices))
    chains = [tuple(draw.choices(range(graphs), k=draw.randint(2, 5))) for _ in range(2)]
    return chains, members


@pytest.mark.parametrize("seed", range(50))
def test_the_peak_of_a_step_is_that_of_its_moments(seed: int) -> None:
    chains, members = drawn(seed, 3)
    memories = {number: member.memory for number, member in members.items()}
    gradients = {number: member.gradient_bytes for number, member in members.items()}
    for chain in chains:
        peak = step_peak_bytes(chain, memories, gradients)
        # While a forward runs the later ones have left no gradients; what is counted then is at most that much more.
        assert played(chain, memories, gradients) <= peak
        no_gradients = dict.fromkeys(gradients, 0)
        assert played(chain, memories, no_gradients) == step_peak_bytes(chain, memories, no_gradients)
        for number in chain:
            share = share_of(number, [chain], members, 0.5)
            assert share.peak_bytes(memories[number]) == peak
            references = {other: member.reference for other, member in members.items()}
            assert share.reference_bytes(members[number].reference) == step_peak_bytes(chain, references, gradients)


@pytest.mark.parametrize("budget", [0.6, 60, "min"])
@pytest.mark.parametrize("seed", range(20))
def test_the_plans_settled_on_are_the_best_of_all(seed: int, budget: int | float | str) -> None:
    chains, members = drawn(seed, 3)
    used = sorted({number for chain in chains for number in chain})
    gradients = {number: member.gradient_bytes for number, member in members.items()}
    allowed = several.budget_bytes(chains, members, budget)

    def judged(chosen: Sequence[Choice]) -> tuple[int, float]:
        memories = {number: choice.memory for number, choice in zip(used, chosen, strict=True)}
        peak = max(step_peak_bytes(chain, memories, gradients) for chain in chains)
        calls = {number: max(chain.count(number) for chain in chains) for number in used}
        seconds = sum(calls[n] * choice.seconds for n, choice in zip(used, chosen, strict=True))
        return max(0, peak - allowed), seconds

    best = min(judged(chosen) for chosen in itertools.product(*(members[number].choices for number in used)))
    found = settle(chains, members, budget)
    assert sorted(found) == used
    assert judged([found[number] for number in used]) == best


def test_many_graphs_are_settled_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, members = drawn(7, 40, most_choices=20)
    chain = tuple(range(40))
    tried = []
    monkeypatch.setattr(several, "MOST_TRIED", 500)
    original = several.step_peak_bytes
    monkeypatch.setattr(several, "step_peak_bytes", lambda *a: tried.append(1) or original(*a))
    assert sorted(settle([chain], members, 0.5)) == list(range(40))
    assert len(tried) < 2000


# --- training ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, breaks: bool = False, last: bool = False, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.breaks, self.last = breaks, last

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh().sin()
        if self.breaks:
            torch._dynamo.graph_break()
        return x.square().mean() if self.last else x


class Broken(nn.Module):
    """Three blocks, with a break after each of the first two."""

    def __init__(self, breaks: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks and place < 2, last=place == 2) for place in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """What other tests have compiled is dropped."""
    gc.collect()
    stepwise._GROUPS.clear()
    stepwise._LIVE.clear()


def options(budget: Any, inner: str = "eager", **others: Any) -> dict[str, Any]:
    return {"inner": inner, "strict": True, "budget": budget, **others}


def peaks(model: nn.Module, call: Any, x: Tensor, steps: int = 4) -> list[int]:
    """The measured peak of each step."""
    memory.install("cpu")
    found = []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        gc.collect()
        gc.disable()
        found.append(memory.measure(lambda: call(x).backward()).peak_bytes)
        gc.enable()
    return found


def check_gradients(model: nn.Module, call: Any, x: Tensor) -> None:
    def of(fn: Any) -> list[Tensor | None]:
        model.zero_grad(set_to_none=True)
        fn(x).backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(of(call), of(model))


def planned_since(count: int) -> list[remat.PlanSummary]:
    return list(remat.summaries()[count:])


@pytest.mark.parametrize("budget", [0.5, 0.7, 900_000, "min"])
def test_the_whole_step_keeps_the_budget_from_the_second_step_on(budget: Any) -> None:
    model, x = Broken(), torch.randn(512, 32)
    count = len(remat.summaries())
    call = torch.compile(model, backend="remat", options=options(budget))
    measured = peaks(model, call, x)
    check_gradients(model, call, x)
    (free,) = set(peaks(model, torch.compile(model, backend="remat", options={"inner": "eager"}), x, 3)[1:])
    planned = [summary for summary in planned_since(count) if summary.step_graphs]
    assert planned or budget == "min", "compiled again"
    (last,) = set(measured[1:])
    if budget != "min":
        assert last <= planned[-1].step_peak_bytes
        assert planned[-1].step_peak_bytes <= planned[-1].budget_bytes
        assert last <= planned[-1].budget_bytes
        # Of what it may take it takes most: the blocks are alike, and the finest step is a value of one of them.
        assert last > 0.75 * planned[-1].budget_bytes
    assert last < 0.75 * free
    assert all(f"for a step of {summary.step_graphs} graphs" in summary.line() for summary in planned)


def test_a_fraction_is_of_the_whole_step_under_pytorchs_plans() -> None:
    model, x = Broken(), torch.randn(512, 32)
    torchs = torch.compile(model, backend="remat", options={"inner": "eager", "partitioner": "torch"})
    (theirs,) = set(peaks(model, torchs, x, 3)[1:])
    torch._dynamo.reset()
    count = len(remat.summaries())
    call = torch.compile(model, backend="remat", options=options(0.6))
    peaks(model, call, x, 2)
    found = [summary for summary in planned_since(count) if summary.step_graphs][-1]
    assert abs(found.budget_bytes / (0.6 * theirs) - 1) < 0.06


def test_a_budget_that_needs_nothing_recomputed_recomputes_nothing() -> None:
    model, x = Broken(), torch.randn(512, 32)
    count = len(remat.summaries())
    call = torch.compile(model, backend="remat", options=options("1GiB"))
    peaks(model, call, x, 2)
    planned = planned_since(count)
    assert all(summary.recomputed_flops for summary in planned[:2]), "before others small"
    again = [summary for summary in planned if summary.step_graphs]
    assert again
    assert not any(summary.recomputed_flops for summary in again)


def test_blocks_compiled_one_by_one_share_a_budget() -> None:
    model, x = Broken(breaks=False), torch.randn(512, 32)
    (free,) = set(peaks(model, model, x, 2))
    count = len(remat.summaries())
    for block in model.blocks:
        block.compile(backend="remat", options=options(1_000_000, strict=False))
    with pytest.warns(RematWarning, match="of a step of 3"):  # the first two left too little to the third
        measured = peaks(model, model, x)
    planned = [summary for summary in planned_since(count) if summary.step_graphs == 3]
    assert planned
    assert set(measured[2:]) == {measured[2]}
    assert measured[2] <= planned[-1].budget_bytes == 1_000_000 < 0.7 * free


def test_two_forwards_before_a_backward_share_a_budget() -> None:
    model, x = Broken(breaks=False), torch.randn(512, 32)
    call = torch.compile(model, backend="remat", options=options(700_000))

    def twice(x: Tensor) -> Tensor:
        return call(x) + call(x)  # type: ignore[no-any-return]

    measured = peaks(model, twice, x)
    assert measured[0] > 700_000 >= measured[2] == measured[3]
    check_gradients(model, lambda x: (call(x) + call(x)) / 2, x)


def test_one_graph_is_never_compiled_again() -> None:
    model, x = Broken(breaks=False), torch.randn(64, 32)
    count = len(remat.summaries())
    call = torch.compile(model, backend="remat", options=options(0.5))
    for _ in range(3):
        kept = [call(x) for _ in range(2)]  # an evaluation that forgot no_grad, whose results are dropped
        del kept
        call(x).backward()
        with torch.no_grad():
            call(x)
    assert [summary.step_graphs for summary in planned_since(count) if summary.origin == "planned"] == [0]


def test_what_cannot_be_reached_is_told_of_the_step() -> None:
    model, x = Broken(), torch.randn(512, 32)
    call = torch.compile(model, backend="remat", options=options(200_000))
    peaks(model, call, x, 1)
    with pytest.raises(BudgetUnreachable, match=r"what the other graphs of a step of 3 have at that moment counted"):
        call(x)
    torch._dynamo.reset()
    call = torch.compile(model, backend="remat", options=options(200_000, strict=False))
    with pytest.warns(RematWarning, match="of a step of 3"):
        peaks(model, call, x, 2)
    check_gradients(model, call, x)


def test_a_plan_that_fails_leaves_the_training_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Broken(), torch.randn(64, 32)
    call = torch.compile(model, backend="remat", options=options(0.5, strict=False))
    call(x).backward()

    def broken(*_: Any) -> Any:
        raise RuntimeError("no plan")

    monkeypatch.setattr("remat.backend._Call.tuned", broken)
    with pytest.warns(RematWarning, match="not planned for its step: RuntimeError: no plan"):
        call(x).backward()
    check_gradients(model, call, x)


def test_steps_that_keep_changing_are_not_compiled_for_ever() -> None:
    model, x = Broken(breaks=False), torch.randn(64, 32)
    call = torch.compile(model, backend="remat", options=options("min"))
    count = len(remat.summaries())
    for calls in range(1, 10):
        sum(call(x) for _ in range(calls)).backward()  # type: ignore[union-attr]
    assert 1 < len(planned_since(count)) <= 1 + stepwise.MOST_AGAIN


def test_symbolic_sizes_keep_their_first_plans() -> None:
    model = Broken()
    count = len(remat.summaries())
    call = torch.compile(model, backend="remat", dynamic=True, options=options("min"))
    for rows in (64, 64, 48):
        x = torch.randn(rows, 32)
        check_gradients(model, call, x)
    assert {summary.step_graphs for summary in planned_since(count)} == {0}


def test_auto_is_read_once_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(auto, "free_bytes", lambda device: asked.append(1) or 2**20)
    model, x = Broken(), torch.randn(512, 32)
    call = torch.compile(model, backend="remat", options=options("auto"))
    measured = peaks(model, call, x)
    assert len(asked) == 1, "what earlier graphs hold is not taken from the step's budget"
    assert measured[1] <= 2**20


@pytest.mark.inductor
def test_under_inductor_the_whole_step_keeps_the_budget() -> None:
    model, x = Broken(), torch.randn(512, 32)
    count = len(remat.summaries())
    call = torch.compile(model, backend="remat", options=options(0.6, inner="inductor"))
    measured = peaks(model, call, x)
    check_gradients(model, call, x)
    planned = [summary for summary in planned_since(count) if summary.step_graphs]
    assert planned
    assert measured[1] == measured[2] <= planned[-1].step_peak_bytes <= planned[-1].budget_bytes
