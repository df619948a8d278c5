"""An allocator that refuses: what it says, what it counts afterwards, how caps nest, and a step under one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import remat
from bench import memory

KIB = 2**10


@pytest.fixture
def meter(no_collection: None) -> Iterator[memory.Meter]:
    gc.collect()  # a cap does so too, and what it frees of earlier tests' would not be this test's
    yield memory.install("cpu")


def kib(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_what_fits_is_given_to_the_byte_and_one_more_is_refused(meter: memory.Meter) -> None:
    with memory.capped(64 * KIB):
        held = kib(64)
        with pytest.raises(RuntimeError):
            torch.empty(1, dtype=torch.uint8)
        assert held.numel() == 64 * KIB


def test_message_names_what_is_live_what_was_asked_and_the_limit(meter: memory.Meter) -> None:
    base = meter.live()
    with memory.capped(10 * KIB):
        held = kib(4)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            kib(7)
    text = f"refused: {base + 4 * KIB} bytes live + {7 * KIB} asked > limit {base + 10 * KIB}"
    assert "DefaultCPUAllocator: can't allocate memory" in str(caught.value)
    assert text in str(caught.value)
    del held


def test_nothing_is_counted_for_what_was_refused(meter: memory.Meter) -> None:
    base = meter.live()
    meter.reset_peak()
    meter.start_events()
    with memory.capped(8 * KIB):
        for _ in range(100):
            with pytest.raises(torch.OutOfMemoryError):
                kib(9)
        assert (meter.live(), meter.peak(), meter.event_count()) == (base, base, 0)
        held = kib(8)
        del held
    assert list(meter.stop_events()) == [8 * KIB, -8 * KIB]
    assert (meter.live(), meter.peak()) == (base, base + 8 * KIB)


def test_freed_memory_may_be_had_again(meter: memory.Meter) -> None:
    with memory.capped(8 * KIB):
        for _ in range(100):
            kib(8)


def test_what_is_alive_at_the_entry_does_not_count(meter: memory.Meter) -> None:
    before = kib(100)
    with memory.capped(8 * KIB):
        held = kib(8)
        with pytest.raises(torch.OutOfMemoryError):
            kib(1)
        # Memory from before that is freed meanwhile may be used.
        del before
        more = kib(100)
    del held, more


def test_lifted_afterwards_after_an_error_too(meter: memory.Meter) -> None:
    with memory.capped(KIB):
        pass
    kib(100)
    with pytest.raises(torch.OutOfMemoryError), memory.capped(KIB):
        kib(2)
    kib(100)


@pytest.mark.parametrize(("outer", "inner"), [(16, 8), (8, 16)])
def test_the_narrowest_of_nested_caps_holds(meter: memory.Meter, outer: int, inner: int) -> None:
    with memory.capped(outer * KIB):
        with memory.capped(inner * KIB):
            kib(8)
            with pytest.raises(torch.OutOfMemoryError):
                kib(9)
        kib(outer)
        with pytest.raises(torch.OutOfMemoryError):
            kib(outer + 1)
    kib(100)


def test_resizing_is_refused_and_leaves_the_tensor(meter: memory.Meter) -> None:
    held = torch.arange(4)
    with memory.capped(KIB), pytest.raises(torch.OutOfMemoryError):
        held.untyped_storage().resize_(100 * KIB)
    assert held.tolist() == [0, 1, 2, 3]


def test_operators_leave_nothing_behind(meter: memory.Meter) -> None:
    matrix = torch.ones(64, 64)
    base = meter.live()
    with memory.capped(40 * KIB), pytest.raises(torch.OutOfMemoryError):
        (matrix + 1) @ (matrix + 2) @ (matrix + 3)
    assert meter.live() == base


def test_threads_share_one_cap(meter: memory.Meter) -> None:
    """Each of eight threads asks for half of the cap again and again: never three halves at once."""
    base, refused, held = meter.live(), [], []

    def work() -> None:
        for _ in range(200):
            try:
                mine = kib(32)
                held.append(meter.live() - base)
                del mine
            except torch.OutOfMemoryError as error:
                refused.append(error)

    meter.reset_peak()
    with memory.capped(64 * KIB):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(held) + len(refused) == 8 * 200
    assert held
    assert meter.peak() - base <= 64 * KIB
    assert meter.live() == base


def test_negative_caps_are_an_error() -> None:
    with pytest.raises(ValueError, match="may not be negative"), memory.capped(-1):
        pass


def chain() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [module for _ in range(8) for module in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(256, 16)


def step(call: object, x: torch.Tensor) -> float:
    loss = call(x).square().mean()  # type: ignore[operator]
    loss.backward()
    return float(loss.detach())


def test_a_plan_runs_under_its_budget_and_eager_mode_does_not(meter: memory.Meter) -> None:
    model, x = chain()
    expected = step(model, x)
    model.zero_grad(set_to_none=True)
    compiled = torch.compile(
        lambda x: model(x).square().mean(), backend="remat", options={"inner": "eager", "budget": "min"}
    )
    compiled(x).backward()  # compiles both halves, whose constants and trials are no part of a step
    cap = remat.summaries()[-1].predicted_peak_bytes
    model.zero_grad(set_to_none=True)
    with memory.capped(cap):
        loss = compiled(x)
        loss.backward()
    torch.testing.assert_close(float(loss), expected)
    del loss
    model.zero_grad(set_to_none=True)
    base = meter.live()
    with pytest.raises(torch.OutOfMemoryError), memory.capped(cap):
        step(model, x)
    model.zero_grad(set_to_none=True)
    assert meter.live() <= base


@pytest.mark.inductor
def test_code_of_inductor_is_refused_too(meter: memory.Meter) -> None:
    compiled = torch.compile(lambda x: (x.sin() @ x).cos())
    x = torch.ones(64, 64)
    compiled(x)
    base = meter.live()
    with memory.capped(KIB), pytest.raises(torch.OutOfMemoryError, match="refused: "):
        compiled(x)
    assert meter.live() == base
    compiled(x)
