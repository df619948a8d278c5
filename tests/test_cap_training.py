"""Training under a cap: it ends where memory runs out, changes nothing where it does not, and is told as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench import cap_tables, memory
from bench.cap_training import ACCUMULATION, Trainer
from bench.results import MIB, SCHEMA, Row


class Loss(nn.Module):
    """A wide hidden layer, statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(), nn.Linear(64, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).square().mean()


@pytest.fixture
def trainer(no_collection: None) -> Trainer:
    memory.install("cpu")
    module = Loss()
    batches = [(torch.randn(32, 8),) for _ in range(3)]
    return Trainer(module, copy.deepcopy(module.state_dict()), batches, steps=4, seed=0, device="cpu")


def test_at_its_own_peak_a_training_is_the_same_to_the_bit(trainer: Trainer) -> None:
    free = trainer.train(trainer.module, None)
    capped = trainer.train(trainer.module, free.peak_bytes)
    assert capped.equals(free)
    assert capped.refusal is None
    assert len(capped.losses) == len(capped.norms) == 4
    assert capped.distance(free) == 0


def test_one_byte_less_ends_it(trainer: Trainer) -> None:
    free = trainer.train(trainer.module, None)
    refused = trainer.train(trainer.module, free.peak_bytes - 1)
    assert refused.refusal is not None
    assert (refused.refusal.step, refused.refusal.micro_batch) == (1, 1)
    assert "refused: " in refused.refusal.message
    assert refused.losses == []
    # And leaves nothing behind that the next run would notice.
    assert trainer.train(trainer.module, None).equals(free)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_half_and_micro_batch_of_a_refusal(trainer: Trainer, half: str) -> None:
    """What is asked beyond the cap in the second step's second micro-batch is refused there."""
    free = trainer.train(trainer.module, None)
    calls = 0

    def call(inputs: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        loss = trainer.module(inputs)
        if calls == 2 * ACCUMULATION:
            if half == "forward":
                torch.empty(MIB)
            loss.register_hook(lambda gradient: gradient + torch.empty(MIB).sum())
        return loss

    refusal = trainer.train(call, free.peak_bytes).refusal
    assert refusal is not None
    assert (refusal.step, refusal.micro_batch, refusal.half) == (2, ACCUMULATION, half)


def row(variant: str, peak_mib: int | None = None, cap_mib: int = 10, **extra: Any) -> Row:
    origin = {"schema": SCHEMA, "command": "", "git": "", "torch": "", "device": ""}
    sizes = {"budget_bytes": cap_mib * MIB, "peak_bytes": None if peak_mib is None else peak_mib * MIB}
    return Row("gpt2", variant, {}, **origin, **sizes, extra={"inner": "eager", "right": True, "refusal": None} | extra)


EQUAL, NEAR = {"equal": True, "distance": 0.0}, {"equal": False, "distance": 2e-7}
MINE = {"steps": 100, "steps_asked": 100, "capped_peak_bytes": 9 * MIB}
ROWS = (
    row("cap"),
    row("remat", 9, **MINE, compared={"uncapped": EQUAL, "eager": NEAR}),
    row("eager", 8, cap_mib=20),
    row("inductor-1.0", 40, refusal={"half": "backward", "step": 1}),
    row("inductor-0.5", 30, refusal={"half": "forward", "step": 2}, right=False),
    row("inductor-0.1", 10),
    row("inductor-0.0", 9, right=False),
)


def test_outcomes_are_told_in_words() -> None:
    found = {name: cap_tables.outcome(one) for name, one in cap_tables.caps_of(ROWS)[0].rows.items()}
    assert found == {
        "remat": "finished",
        "inductor-1.0": "out of memory, backward of step 1",
        "inductor-0.5": "out of memory, forward of step 2",
        "inductor-0.1": "finished",
        "inductor-0.0": "wrong gradients",
    }


def test_lines_of_the_tables() -> None:
    """A row measured under another cap, as eager mode's here, is not shown."""
    heading, line = cap_tables.cells(ROWS)
    assert len(heading) == len(line)
    assert line[2:10] == ["10.00", "25%", "9.00", "100 of 100", "equal", "n/a", "2.0e-07", "n/a"]
    assert line[10:] == ["2", "1", "1"]
    heading, line = cap_tables.peer_cells(ROWS)
    told = dict(zip(heading, line, strict=True))
    assert told["eager"] == "n/a"
    assert told["inductor-0.5"] == "out of memory, forward of step 2 (30.00, wrong gradients)"
    assert told["inductor-0.0"] == "wrong gradients (9.00)"
