"""Shared settings of the tests: one torch thread, fixed seeds, no compiled state left over between tests."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

import remat  # noqa: F401  registers the backend for a checkout that is not installed


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--slow` runs the tests that need minutes too; `make test-all` gives it."""
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless they are asked for: others of the same kind, on smaller models, always run."""
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


@pytest.fixture(scope="session")
def empty_caches(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for the user's caches without a calibration: plans must not depend on who runs the tests."""
    return str(tmp_path_factory.mktemp("caches"))


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch, empty_caches: str) -> Iterator[None]:
    """Every test compiles anew, from the same random state, and with no REMAT_* or calibration of the caller's."""
    monkeypatch.setenv("XDG_CACHE_HOME", empty_caches)
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
