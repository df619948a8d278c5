"""Trains `CharGPT` on a corpus, the same way whatever compiles the model."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import remat
from bench.chargpt import CharGPT
from bench.corpus import Corpus
from bench.memory import StepMemory, step_memory
from bench.timing import training_step
from bench.variants import LossFunction, Variant, summaries_since

VALIDATION_EVERY = 20
VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Setup:
    """What the two runs have in common. `batch` windows of `context` characters make one micro-batch.

    The learning rate rises linearly over the first `warmup` steps. Without that, the first steps of AdamW
    amplify rounding: two eager runs whose weights differ by 1e-7 were 2e-2 of the loss apart after 24 steps.
    """

    steps: int
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    accumulation: int
    dropout: float
    attention: str
    learning_rate: float
    warmup: int
    clip: float
    seed: int
    device: str


@dataclass(frozen=True)
class Run:
    """One finished training. Losses in nats per character; `validation` holds (step, loss) pairs."""

    variant: Variant
    model: LossFunction
    module: CharGPT
    compile_seconds: float
    training: list[float]
    validation: list[tuple[int, float]]
    memory: StepMemory
    summaries: tuple[Any, ...]


def build_model(setup: Setup, vocabulary: int) -> CharGPT:
    """The model with weights drawn from the setup's seed, in training mode."""
    torch.manual_seed(setup.seed)
    shape = (vocabulary, setup.context, setup.layers, setup.width, setup.heads)
    return CharGPT(*shape, dropout=setup.dropout, attention=setup.attention).to(setup.device)


class Batches:
    """Micro-batches drawn from a seed of their own: every run sees the same ones, whatever else it draws."""

    def __init__(self, setup: Setup, corpus: Corpus, text: Tensor, seed: int) -> None:
        self._setup, self._corpus, self._text = setup, corpus, text
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Characters and the characters that follow them, on the setup's device."""
        setup = self._setup
        tokens, targets = self._corpus.batch(self._text, setup.batch, setup.context, self._generator)
        return tokens.to(setup.device), targets.to(setup.device)


def sample_batch(setup: Setup, corpus: Corpus) -> tuple[Tensor, Tensor]:
    """The micro-batch on which memory, time and gradients are measured."""
    return Batches(setup, corpus, corpus.training, setup.seed).next()


def train(variant: Variant, setup: Setup, corpus: Corpus, progress: Callable[[int, float], None]) -> Run:
    """Compile, train, and measure the memory of one step; calls `progress(step, loss)` after each step."""
    module = build_model(setup, len(corpus.vocabulary))
    model = variant.compile(module)
    planned_before = len(remat.summaries())
    sample = sample_batch(setup, corpus)
    start = time.perf_counter()
    training_step(model, sample, module.parameters())
    compile_seconds = time.perf_counter() - start if variant.backend else 0.0

    torch.manual_seed(setup.seed)
    batches = Batches(setup, corpus, corpus.training, setup.seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=setup.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / setup.warmup))
    training: list[float] = []
    validation: list[tuple[int, float]] = []
    for step in range(1, setup.steps + 1):
        training.append(_optimizer_step(model, module, optimizer, batches, setup))
        schedule.step()
        if step % VALIDATION_EVERY == 0 or step == setup.steps:
            validation.append((step, validation_loss(module, setup, corpus)))
        progress(step, training[-1])
    memory = step_memory(lambda: model(*sample), module.parameters(), setup.device)
    summaries = summaries_since(planned_before) if variant.is_remat else ()
    return Run(variant, model, module, compile_seconds, training, validation, memory, summaries)


def validation_loss(module: nn.Module, setup: Setup, corpus: Corpus) -> float:
    """Mean loss on the same held-out batches each time, run eagerly: only training is compiled."""
    batches = Batches(setup, corpus, corpus.validation, setup.seed)
    module.eval()
    with torch.no_grad():
        losses = [float(module(*batches.next())) for _ in range(VALIDATION_BATCHES)]
    module.train()
    return sum(losses) / len(losses)


def _optimizer_step(
    model: LossFunction, module: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, setup: Setup
) -> float:
    """One update from `accumulation` micro-batches; returns their mean loss."""
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for _ in range(setup.accumulation):
        loss = model(*batches.next()) / setup.accumulation
        loss.backward()
        total += float(loss.detach())
    nn.utils.clip_grad_norm_(module.parameters(), setup.clip)
    optimizer.step()
    return total
