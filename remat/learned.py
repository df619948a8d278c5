"""A small regression that prices operators that were not timed, from those that were.

For each family of operators the logarithm of seconds over the roofline's is a linear function of the logarithms of
FLOPs, bytes, their ratio, characteristic sizes and the element's width: a ridge regression, in closed form. It answers
only within the range that it has seen, and only for families where it was better than the roofline on samples that it
was not fitted to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from remat.devices import Device
from remat.measured import DIMS, FAMILIES, Operator, Sample, roofline_seconds

Array = npt.NDArray[np.float64]

# Of different sizes in a family: there are up to nine coefficients, and with fewer than a dozen the error says little.
MIN_SAMPLES: Final = 12
FOLDS: Final = 5
# By how much FLOPs, bytes or a size may lie beyond the range of the samples. The law is bent (small operators are all
# overhead, large ones all arithmetic), so that a line holds not much further than it was drawn.
MARGIN: Final = 4.0
# Part of the roofline's median error that the regression's must stay below, and by how many standard errors it must be
# better on average: on 200 draws of nothing but noise around the roofline, 40 samples each, the first let 27 pass,
# both 1.
BETTER: Final = 0.9
SURE: Final = 2.0
# From hardly any to nearly a constant, each a factor of ten: the error changes little between neighbours.
_STRENGTHS: Final = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
_FORMAT: Final = 1


@dataclass(frozen=True)
class Model:
    """One family's regression, and the ranges it holds in.

    weights: of the standardized features. low, high: by feature that is checked, as seen. itemsizes: the widths seen.
    ratios: the least and the largest logarithm of seconds over the roofline's that was seen; no answer goes beyond.
    """

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    low: tuple[float, ...]
    high: tuple[float, ...]
    itemsizes: tuple[int, ...]
    ratios: tuple[float, float]

    def log_ratio(self, features: Array) -> float:
        """The logarithm of seconds over the roofline's."""
        standard = (features - np.array(self.mean)) / np.array(self.scale)
        return float(np.clip(standard @ np.array(self.weights) + self.bias, *self.ratios))

    def covers(self, operator: Operator) -> bool:
        """Whether this operator is like those seen."""
        margin = math.log(MARGIN)
        sizes = _sizes(operator)
        inside = (a - margin <= s <= b + margin for a, s, b in zip(self.low, sizes, self.high, strict=True))
        return operator.itemsize in self.itemsizes and all(inside)


@dataclass(frozen=True)
class Learned:
    """What was learned of a device, by family.

    device: the figures of the roofline it corrects. error, roofline_error: median of |predicted / true - 1| by
    cross-validation, for families with enough samples, and of the roofline alone, for all. counts: samples.
    """

    device: Device
    models: Mapping[str, Model]
    error: Mapping[str, float]
    roofline_error: Mapping[str, float]
    counts: Mapping[str, int]

    def seconds(self, operator: Operator) -> float | None:
        """The predicted seconds; None where too little is known, and the roofline is the better guess."""
        model = self.models.get(operator.family)
        if model is None or not model.covers(operator):
            return None
        return roofline_seconds(operator, self.device) * math.exp(model.log_ratio(_features(operator)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        models = {family: {k: _plain(v) for k, v in vars(model).items()} for family, model in self.models.items()}
        return {
            "format": _FORMAT,
            "device": self.device.as_dict(),
            "models": models,
            "error": dict(self.error),
            "roofline_error": dict(self.roofline_error),
            "counts": dict(self.counts),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Learned:
        """What `to_dict` gave; a ValueError for what is none."""
        try:
            if data["format"] != _FORMAT:
                raise ValueError(f"learned prices of format {data['format']!r}, this version's is {_FORMAT}")
            models = {family: _model(family, entry) for family, entry in data["models"].items()}
            error, roofline_error = _numbers(data["error"]), _numbers(data["roofline_error"])
            counts = {_known(family): int(count) for family, count in data["counts"].items()}
            return cls(Device.from_dict(data["device"]), models, error, roofline_error, counts)
        except (TypeError, KeyError, AttributeError) as cause:
            raise ValueError(f"no learned prices: {cause!r}") from cause


def fit(samples: Sequence[Sample], device: Device) -> Learned | None:
    """Learn from timed operators; None where there are none. The same samples in any order give the same answer."""
    models: dict[str, Model] = {}
    error: dict[str, float] = {}
    roofline_error: dict[str, float] = {}
    counts: dict[str, int] = {}
    by_key = {sample.key: sample for sample in sorted(samples, key=lambda sample: (sample.key, sample.seconds))}
    for family in FAMILIES:
        members = [sample for sample in by_key.values() if sample.family == family]
        if not members:
            continue
        counts[family] = len(members)
        features = np.array([_features(sample) for sample in members])
        ratios = np.array([math.log(sample.seconds / roofline_seconds(sample, device)) for sample in members])
        roofline_error[family] = _error(np.zeros(len(members)), ratios)
        folds = _folds(members)
        if max(folds) + 1 < FOLDS:
            continue
        predicted = {strength: _predicted_unseen(features, ratios, folds, strength) for strength in _STRENGTHS}
        strength = min(_STRENGTHS, key=lambda s: float(np.square(predicted[s] - ratios).mean()))
        error[family] = _error(predicted[strength], ratios)
        gains = np.abs(ratios) - np.abs(predicted[strength] - ratios)
        is_sure = gains.mean() > SURE * gains.std() / math.sqrt(len(gains))
        if is_sure and error[family] < BETTER * roofline_error[family]:
            models[family] = _fitted(members, features, ratios, strength)
    return Learned(device, models, error, roofline_error, counts) if counts else None


def _sizes(operator: Operator) -> list[float]:
    """Logarithms of what must lie within the range seen."""
    return [math.log(max(number, 1)) for number in (operator.flops, operator.bytes, *operator.dims)]


def _features(operator: Operator) -> Array:
    sizes = _sizes(operator)
    return np.array([*sizes, sizes[0] - sizes[1], float(operator.itemsize)])


def _folds(samples: Sequence[Sample]) -> list[int]:
    """The fold of each sample, fixed by what it is; none where there are too few different ones.

    Those of equal sizes (a transposed argument, a bias) share a fold: a model that saw one has seen the other.
    """
    shapes = [(*s.dims, s.itemsize) if s.dims else (s.flops, s.bytes, s.itemsize) for s in samples]
    ordered = sorted(set(shapes), key=lambda shape: hashlib.sha256(repr(shape).encode()).digest())
    if len(ordered) < MIN_SAMPLES:
        return [0] * len(samples)
    place = {shape: position % FOLDS for position, shape in enumerate(ordered)}
    return [place[shape] for shape in shapes]


def _predicted_unseen(features: Array, ratios: Array, folds: Sequence[int], strength: float) -> Array:
    """Each sample's ratio by a model that was fitted without its fold."""
    predicted = np.zeros(len(ratios))
    for fold in range(FOLDS):
        held = np.array(folds) == fold
        mean, scale, weights, bias = _ridge(features[~held], ratios[~held], strength)
        answers = (features[held] - mean) / scale @ weights + bias
        predicted[held] = np.clip(answers, ratios[~held].min(), ratios[~held].max())
    return predicted


def _ridge(features: Array, ratios: Array, strength: float) -> tuple[Array, Array, Array, float]:
    """Mean and scale of the features, weights of the standardized ones, and the mean ratio."""
    mean = features.mean(axis=0)
    spread = features.std(axis=0)
    scale = np.where(spread > 1e-9, spread, 1.0)  # a feature that never changes tells nothing and divides by nothing
    standard = (features - mean) / scale
    bias = float(ratios.mean())
    penalty = strength * len(ratios) * np.eye(features.shape[1])
    weights = np.linalg.solve(standard.T @ standard + penalty, standard.T @ (ratios - bias))
    return mean, scale, weights, bias


def _error(predicted: Array, ratios: Array) -> float:
    return float(np.median(np.abs(np.exp(predicted - ratios) - 1)))


def _fitted(samples: Sequence[Sample], features: Array, ratios: Array, strength: float) -> Model:
    mean, scale, weights, bias = _ridge(features, ratios, strength)
    sizes = np.array([_sizes(sample) for sample in samples])
    return Model(
        tuple(mean.tolist()),
        tuple(scale.tolist()),
        tuple(weights.tolist()),
        bias,
        tuple(sizes.min(axis=0).tolist()),
        tuple(sizes.max(axis=0).tolist()),
        tuple(sorted({sample.itemsize for sample in samples})),
        (float(ratios.min()), float(ratios.max())),
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _known(family: Any) -> str:
    if family not in FAMILIES:
        raise ValueError(f"no family of operators: {family!r}")
    return str(family)


def _numbers(data: Any) -> dict[str, float]:
    numbers = {_known(family): float(number) for family, number in data.items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError("an error that is no number")
    return numbers


def _model(family: Any, data: Any) -> Model:
    values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in data.items()}
    model = Model(**values)
    sizes = 2 + (0 if _known(family) == "other" else DIMS)
    lengths = (model.mean, model.scale, model.weights), (model.low, model.high)
    numbers = [*(n for group in lengths for values in group for n in values), model.bias, *model.ratios]
    sound = (
        all(len(values) == sizes + 2 for values in lengths[0])
        and all(len(values) == sizes for values in lengths[1])
        and len(model.ratios) == 2
        and all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        and all(number > 0 for number in model.scale)
        and all(type(number) is int for number in model.itemsizes)
    )
    if not sound:
        raise ValueError(f"no learned prices of {family}")
    return model
