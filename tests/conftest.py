"""Shared settings of the tests: one torch thread, fixed seeds, no compiled state left over between tests."""

import gc
from collections.abc import Iterator

import pytest
import torch

import remat  # noqa: F401  registers the backend for a checkout that is not installed


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test compiles anew, from the same random state, and with no REMAT_* of the caller's shell."""
    import os

    for name in list(os.environ):
        if name.startswith("REMAT_"):
            monkeypatch.delenv(name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What the garbage collector would free in the midst of a measurement belongs to no step."""
    gc.disable()
    yield
    gc.enable()
