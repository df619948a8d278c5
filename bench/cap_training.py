"""Training steps whose every micro-batch runs under a cap on the bytes alive.

The cap is above what is alive when a forward starts: parameters, optimizer state, inputs, and gradients that earlier
micro-batches accumulated. It holds until the end of that micro-batch's backward; clipping and the optimizer run
without it.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench import memory
from bench.models import build, parse_spec
from bench.variants import LossFunction

ACCUMULATION = 2
# Different micro-batches, used in turn.
BATCHES = 8
LEARNING_RATE, CLIP = 1e-3, 1.0
# Without a rise of the learning rate the first steps of AdamW amplify rounding (bench/trainer.py).
WARM_UP_STEPS = 30


@dataclass(frozen=True)
class Refusal:
    """Where memory ran out: step and micro-batch from 1, `half` "forward" or "backward", the allocator's message."""

    step: int
    micro_batch: int
    half: str
    message: str


@dataclass(frozen=True)
class Training:
    """What a training came to. `losses` and `norms` (of the gradients, before clipping) have one entry a whole step.

    peak_bytes: the most bytes alive in a micro-batch above those at its start. refusal: None if all steps finished.
    """

    losses: list[float]
    norms: list[float]
    parameters: list[Tensor]
    peak_bytes: int
    refusal: Refusal | None

    def equals(self, other: "Training") -> bool:
        """Whether losses, gradient norms and final parameters are the same to the last bit."""
        curves = (self.losses, self.norms) == (other.losses, other.norms)
        return curves and all(map(torch.equal, self.parameters, other.parameters))

    def distance(self, other: "Training") -> float:
        """The largest relative difference between the losses of a step."""
        pairs = zip(self.losses, other.losses, strict=True)
        return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def micro_batches(model: str, device: str) -> list[tuple[Tensor, ...]]:
    """Arguments for the model of this specification, `BATCHES` different ones."""
    name, overrides = parse_spec(model)
    return [build(name, seed=1 + index, device=device, **overrides).args for index in range(BATCHES)]


@dataclass(frozen=True)
class Trainer:
    """What the runs of one model have in common: weights at the start, micro-batches, steps, seed."""

    module: nn.Module
    start: dict[str, Any]
    batches: Sequence[tuple[Tensor, ...]]
    steps: int
    seed: int
    device: str

    def train(self, call: LossFunction, cap_bytes: int | None) -> Training:
        """Train `call`, which computes the loss of `module`, from the start; without a cap if there is none.

        Ends at the first refusal. What is compiled has to be so already: compiling anew is an error.
        """
        self.module.load_state_dict(self.start)
        torch.manual_seed(self.seed)
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / WARM_UP_STEPS))
        losses: list[float] = []
        norms: list[float] = []
        peaks = [0]
        refusal = None
        with torch.compiler.set_stance("fail_on_recompile"):
            for step in range(self.steps):
                optimizer.zero_grad(set_to_none=True)
                found = self._micro_batches(call, step, cap_bytes, peaks)
                if isinstance(found, Refusal):
                    refusal = found
                    break
                losses.append(found)
                norms.append(float(nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)))
                optimizer.step()
                schedule.step()
        parameters = [parameter.detach().clone() for parameter in self.module.parameters()]
        return Training(losses, norms, parameters, max(peaks), refusal)

    def _micro_batches(
        self, call: LossFunction, step: int, cap_bytes: int | None, peaks: list[int]
    ) -> float | Refusal:
        """The mean loss of one step's micro-batches, their gradients accumulated; notes the peak of each."""
        meter = memory.install(self.device)
        total = 0.0
        for index in range(ACCUMULATION):
            args = self.batches[(step * ACCUMULATION + index) % len(self.batches)]
            half = "forward"
            cap = contextlib.nullcontext() if cap_bytes is None else memory.capped(cap_bytes, self.device)
            try:
                with cap:
                    entry = meter.live()
                    meter.reset_peak()
                    loss = call(*args) / ACCUMULATION
                    half = "backward"
                    loss.backward()
                    peaks.append(meter.peak() - entry)
            except torch.OutOfMemoryError as error:
                return Refusal(step + 1, index + 1, half, str(error).partition("\n")[0])
            total += float(loss.detach())
            del loss
        return total
