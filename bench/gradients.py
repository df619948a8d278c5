"""How far gradients are from those of the same model, run eagerly in float64."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# A gradient this far below the largest is zero in exact arithmetic (a key bias under a softmax, a bias before
# BatchNorm): what floats leave of it is noise, and relative to itself any noise is large.
ZERO = 1e-9


def gradients(
    model: Callable[..., Tensor], args: Sequence[Any], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients of one step, zeros where a parameter has none."""
    for parameter in parameters:
        parameter.grad = None
    model(*args).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]


def reference_gradients(model: nn.Module, args: Sequence[Any]) -> list[Tensor]:
    """The gradients of a float64 copy of `model`, which is left untouched."""
    exact = copy.deepcopy(model).double()
    exact_args = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    return gradients(exact, exact_args, list(exact.parameters()))


def gradient_error(actual: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest |actual - reference| / |reference| of a parameter's gradient, in Euclidean norms."""
    norms = [float(gradient.norm()) for gradient in reference]
    largest = max(norms)
    errors = []
    for computed, exact, norm in zip(actual, reference, norms, strict=True):
        scale = norm if norm > ZERO * largest else largest
        errors.append(float((computed.double() - exact.double()).norm()) / scale)
    return max(errors)
