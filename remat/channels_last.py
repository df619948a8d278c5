"""Which inputs of a graph with convolutions Inductor copies to channels last, in the forward and before anything else.

Where its layout optimization is on (`GraphLowering.decide_layout_opt`), whatever a convolution is computed from is
wanted in channels last (`find_nodes_prefer_channels_last`): weights of k x k kernels and the images are copied, and
the backward is given the copies (12.7 MB on a ResNet-14, at every budget).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx

from remat import torch_internals
from remat.costs import NOMINAL_SIZE

# A GPU's graph of so many nodes for each convolution is left as it is, and so are convolutions of few channels.
NODES_FOR_EACH: Final = 300
FEW_CHANNELS: Final = 64

CONVOLUTION: Final = torch.ops.aten.convolution.default


def cloned_inputs(order: Sequence[fx.Node], device: torch.device) -> list[fx.Node]:
    """The inputs that are copied, in the graph's order; `order` is the forward's nodes."""
    if not is_on(order, device):
        return []
    pending = [node for node in order if node.target is CONVOLUTION]
    found, seen = set(), set(pending)
    while pending:
        for argument in pending.pop().all_input_nodes:
            if argument not in seen:
                seen.add(argument)
                pending.append(argument)
                if argument.op == "placeholder" and _needs_copy(argument.meta.get("val")):
                    found.add(argument)
    return [node for node in order[0].graph.nodes if node in found]


def is_on(order: Sequence[fx.Node], device: torch.device) -> bool:
    """Whether Inductor prefers channels last in a graph of these nodes (`GraphLowering.decide_layout_opt`)."""
    convolutions = [node for node in order if node.target is CONVOLUTION]
    if not convolutions:
        return False
    if device.type in ("cpu", "meta"):
        return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    shapes = [(node.args[1].meta["val"].shape, node.args[-1]) for node in convolutions]  # type: ignore[union-attr]
    if len(order) >= NODES_FOR_EACH * len(convolutions) or any(groups > 1 < shape[1] for shape, groups in shapes):  # type: ignore[operator]
        return False
    if any(shape[0] * 2 <= shape[1] and shape[2] > 1 for shape, _ in shapes):
        return False
    return any(max(shape[0], shape[1]) > FEW_CHANNELS for shape, _ in shapes)


def strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of a dense tensor in channels last."""
    found, step = [0] * len(sizes), 1
    for axis in (1, *range(len(sizes) - 1, 1, -1), 0):
        found[axis], step = step, step * sizes[axis]
    return tuple(found)


def _needs_copy(value: Any) -> bool:
    """Whether its elements lie in another order than in channels last."""
    if not isinstance(value, torch.Tensor) or value.ndim not in (4, 5):
        return False
    sizes, given = (
        [torch_internals.nominal_size(size, NOMINAL_SIZE) for size in part] for part in (value.shape, value.stride())
    )
    return any(size > 1 and one != two for size, one, two in zip(sizes, given, strides(sizes), strict=True))
