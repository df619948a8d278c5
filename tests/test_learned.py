"""The regression over timed operators: a known law recovered, an honest error, silence where it knows too little."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from remat import learned, measured
from remat.devices import CPU, Device
from remat.learned import Learned
from remat.measured import Operator, Sample, roofline_seconds


def product(m: int, n: int, k: int, batch: int = 1, itemsize: int = 4) -> Operator:
    count = batch * (m * k + k * n + m * n)
    key = f"mm {batch} {m} {n} {k} {itemsize}"
    return Operator(key, "matmul", 2 * batch * m * n * k, itemsize * count, (batch, m, n, k), itemsize)


def drawn(count: int, seed: int) -> list[Operator]:
    source = random.Random(seed)
    return [product(*(int(2 ** source.uniform(6, 10)) for _ in range(3))) for _ in range(count)]


def timed(operators: list[Operator], law: Callable[[Operator], float], family: str = "matmul") -> list[Sample]:
    return [
        Sample(family + op.key, family, op.flops, op.bytes, op.dims if family != "other" else (), op.itemsize, law(op))
        for op in operators
    ]


def law(operator: Operator) -> float:
    """Efficiency falls with skinny matrices and grows with FLOPs."""
    _, m, n, _ = operator.dims
    skinny = (m / 256) ** 0.15 * (n / 256) ** -0.1
    return 0.7 * roofline_seconds(operator, CPU) * (operator.flops / 1e8) ** -0.2 * skinny


def noisy(spread: float, seed: int, base: Callable[[Operator], float]) -> Callable[[Operator], float]:
    source = random.Random(seed)
    return lambda operator: base(operator) * math.exp(source.gauss(0, spread))


def on_roofline(operator: Operator) -> float:
    return roofline_seconds(operator, CPU)


def fitted(samples: list[Sample], device: Device = CPU) -> Learned:
    model = learned.fit(samples, device)
    assert model is not None
    return model


def test_a_known_law_is_recovered_within_the_range_and_nothing_is_said_beyond():
    model = fitted(timed(drawn(60, 1), law))
    for operator in drawn(40, 2):
        assert model.seconds(operator) == pytest.approx(law(operator), rel=0.1)
    assert model.seconds(product(8192, 8192, 8192)) is None
    assert model.seconds(product(256, 256, 8)) is None
    assert model.seconds(product(256, 256, 256, batch=16)) is None  # no batch was seen
    assert model.seconds(product(256, 256, 256, itemsize=2)) is None
    convolution = Operator("c", "convolution", 10**8, 10**6, (256, 256, 256, 9), 4)
    assert model.seconds(convolution) is None
    assert model.counts == {"matmul": 60}


@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_the_cross_validated_error_is_that_on_operators_not_seen(spread: float):
    model = fitted(timed(drawn(60, 1), noisy(spread, 3, law)))
    true = noisy(spread, 4, law)
    errors = [abs(predicted / true(op) - 1) for op in drawn(300, 5) if (predicted := model.seconds(op)) is not None]
    assert len(errors) > 250
    assert 0.5 < model.error["matmul"] / float(np.median(errors)) < 2


def test_noise_around_the_roofline_teaches_nothing():
    for seed in range(20):
        model = fitted(timed(drawn(40, seed), noisy(0.3, 100 + seed, on_roofline)))
        assert model.models == {} and model.seconds(product(256, 256, 256)) is None


def test_few_samples_or_few_different_ones_leave_the_family_to_the_roofline():
    few = timed(drawn(learned.MIN_SAMPLES - 1, 1), law)
    copies = [Sample(s.key + " again", s.family, s.flops, s.bytes, s.dims, 4, s.seconds) for s in few]
    for samples in (few, few + copies):
        model = fitted(samples)
        assert model.models == {} and model.error == {}
        assert model.roofline_error["matmul"] > 0 and model.counts == {"matmul": len(samples)}
    assert learned.fit([], CPU) is None


def test_families_are_learned_apart():
    samples = timed(drawn(40, 1), law) + timed(drawn(40, 2), lambda op: 5 * on_roofline(op), "other")
    samples += timed(drawn(40, 3), noisy(0.3, 1, on_roofline), "attention")
    model = fitted(samples)
    assert set(model.models) == {"matmul", "other"}
    other = Operator("x", "other", 10**8, 10**6, (), 4)
    assert model.seconds(other) == pytest.approx(5 * on_roofline(other), rel=0.05)


def test_the_same_samples_in_any_order_give_the_same_model_to_the_last_digit():
    samples = timed(drawn(40, 1), noisy(0.2, 1, law)) + timed(drawn(30, 2), noisy(0.2, 2, law), "convolution")
    first = fitted(samples)
    for seed in range(3):
        shuffled = random.Random(seed).sample(samples, len(samples))
        assert fitted(shuffled) == first
    assert fitted(samples + samples) == first


def test_what_was_learned_survives_json():
    model = fitted(timed(drawn(40, 1), law))
    again = Learned.from_dict(json.loads(json.dumps(model.to_dict())))
    assert again == model
    assert again.seconds(product(200, 300, 100)) == model.seconds(product(200, 300, 100))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.pop("device"),
        lambda data: data.update(format=0),
        lambda data: data.update(models=[1]),
        lambda data: data.update(error={"matmul": "much"}),
        lambda data: data.update(counts={"matmuls": 3}),
        lambda data: data["device"].update(bytes_per_second=-1.0),
        lambda data: data["models"].update(convolutions=data["models"]["matmul"]),
        lambda data: data["models"]["matmul"].pop("bias"),
        lambda data: data["models"]["matmul"].update(bias=math.nan),
        lambda data: data["models"]["matmul"]["weights"].pop(),
        lambda data: data["models"]["matmul"].update(low=3),
        lambda data: data["models"]["matmul"]["scale"].__setitem__(0, 0.0),
    ],
)
def test_what_is_malformed_is_a_value_error(spoil: Callable[[Any], Any]):
    data = json.loads(json.dumps(fitted(timed(drawn(40, 1), law)).to_dict()))
    spoil(data)
    with pytest.raises(ValueError):
        Learned.from_dict(data)
    for nothing in (None, [], 3, {}):
        with pytest.raises(ValueError):
            Learned.from_dict(nothing)


def test_on_operators_timed_here_it_is_better_than_the_roofline_or_says_nothing():
    samples = measured.time_grid(torch.device("cpu"), 2.0)
    model = fitted(samples)
    assert model.counts["matmul"] >= learned.MIN_SAMPLES
    for family in model.roofline_error:
        answers = [model.seconds(sample) for sample in samples if sample.family == family]
        if family in model.models:
            assert model.error[family] < model.roofline_error[family]
            assert all(answer is not None and answer > 0 for answer in answers)
        else:
            assert set(answers) == {None}
