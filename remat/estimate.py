"""What a step of a plan takes under Inductor, predicted: the kernels of `fusion`, each by a roofline.

A generated kernel takes as long as its traffic or its arithmetic, whichever is longer, and a launch; an operator
outside what it was timed at, or was learned, or its own roofline (Williams et al., "Roofline", CACM 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from remat import fusion
from remat.costs import Costs
from remat.fusion import Kernel, Lowering
from remat.plan import Plan


@dataclass(frozen=True, eq=False)
class Estimate:
    """A plan's predicted kernels with their seconds."""

    plan: Plan
    costs: Costs

    @cached_property
    def lowering(self) -> Lowering:
        """The kernels that Inductor would make."""
        return fusion.predict(self.plan, self.costs.settings.keeps_schedule())

    @cached_property
    def step_seconds(self) -> float:
        """Forward and backward."""
        halves = (
            (self.lowering.forward, self.lowering.forward_order),
            (self.lowering.backward, self.lowering.backward_order),
        )
        return sum(self.kernel_seconds(kernel, order) for kernels, order in halves for kernel in kernels)

    @cached_property
    def extern_flops(self) -> int:
        """FLOPs of all operators that run."""
        flops = self.costs.flops
        return sum(flops.get(node, 0) for node in (*self.plan.forward, *self.plan.backward))

    def kernel_seconds(self, kernel: Kernel, order: Sequence[fx.Node]) -> float:
        """One launch of a predicted kernel."""
        nodes = [order[step] for step in kernel.steps]
        if kernel.extern:
            return sum(map(self.costs.extern_seconds, nodes))
        moved = self.costs.move_seconds(kernel.read_bytes + kernel.written_bytes)
        arithmetic = sum(map(self.costs.pointwise_seconds, nodes))
        return max(moved, arithmetic) + self.costs.launch_seconds
