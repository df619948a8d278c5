"""What the split makes of a joint graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, eq=False)
class Partition:
    """Forward and backward graph, in AOTAutograd's calling convention.

    forward: takes the primals; returns the forward outputs, then saved tensors, then `num_sizes` saved sizes.
    backward: takes the saved sizes, saved tensors and tangents; returns the gradients.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_sizes: int
