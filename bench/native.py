"""Builds `allocator.cpp` once per torch version and user, and loads it.

The library lies in the user's cache folder, named by a hash of its source and of everything it was built
against, so that neither another torch nor an edited source meets a stale one.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

SOURCE = Path(__file__).with_name("allocator.cpp")
COMPILERS = ("g++", "clang++", "c++")
# What `remat_meter_install` returns.
INSTALL_ERRORS = {
    1: "the CPU allocator in use cannot be wrapped (it has no raw deleter)",
    2: "another CPU allocator with a higher priority is in use",
}


class MeterError(RuntimeError):
    """The exact CPU memory meter cannot be had on this machine; the message says why."""


class AllocatorLibrary:
    """The loaded counting allocator: typed calls over its C interface. All sizes are bytes."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name in ("live", "peak", "event_count", "set_limit", "no_limit"):
            getattr(library, f"remat_meter_{name}").restype = ctypes.c_int64
        library.remat_meter_set_limit.argtypes = (ctypes.c_int64,)
        library.remat_meter_read_events.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._library = library
        code = library.remat_meter_install()
        if code:
            raise MeterError(f"cannot measure CPU memory: {INSTALL_ERRORS[code]}")

    def live(self) -> int:
        return int(self._library.remat_meter_live())

    def peak(self) -> int:
        return int(self._library.remat_meter_peak())

    def reset_peak(self) -> None:
        self._library.remat_meter_reset_peak()

    def set_limit(self, live_bytes: int | None) -> int | None:
        """From now on refuse what would make more than `live_bytes` live (None: nothing); returns the limit until now.

        What is refused raises torch.OutOfMemoryError, a RuntimeError.
        """
        none = int(self._library.remat_meter_no_limit())
        before = int(self._library.remat_meter_set_limit(none if live_bytes is None else live_bytes))
        return None if before == none else before

    def record(self, on: bool) -> None:
        self._library.remat_meter_record(int(on))

    def event_count(self) -> int:
        return int(self._library.remat_meter_event_count())

    def read_events(self) -> NDArray[np.int64]:
        events = np.zeros(self.event_count(), dtype=np.int64)
        self._library.remat_meter_read_events(events.ctypes.data, events.size)
        return events


def load_allocator() -> AllocatorLibrary:
    """Build the counting allocator if this user has none for this torch, load it, and install it."""
    compiler = _compiler()
    command = _build_command(compiler)
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + "\0".join(command).encode())
    path = _cache_folder() / f"allocator-{key.hexdigest()[:16]}.so"
    if not path.exists():
        _build(command, path)
    return AllocatorLibrary(path)


def _compiler() -> str:
    """`$CXX`, or the first C++ compiler on the path."""
    named = os.environ.get("CXX")
    for candidate in (named,) if named else COMPILERS:
        if found := shutil.which(candidate):
            return found
    looked_for = f"$CXX={named}" if named else ", ".join(COMPILERS)
    raise MeterError(f"cannot measure CPU memory: no C++ compiler found (looked for {looked_for})")


def _build_command(compiler: str) -> list[str]:
    """The compiler's command line, without the output file."""
    torch_folder = Path(torch.__file__).parent
    return [
        *(compiler, "-O2", "-std=c++20", "-shared", "-fPIC"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{torch_folder / 'include'}",
        str(SOURCE),
        *(f"-L{torch_folder / 'lib'}", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}"),
    ]


def _build(command: list[str], path: Path) -> None:
    """Compile into a private folder, then move into place: processes may build at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
        if done.returncode:
            raise MeterError(f"cannot build the CPU memory meter: {command[0]} says\n{done.stderr.strip()}")
        built.replace(path)


def _cache_folder() -> Path:
    """Where this user's cached builds lie: `$XDG_CACHE_HOME/remat-bench`, or `~/.cache/remat-bench`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "remat-bench"
