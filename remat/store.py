"""Small JSON documents on disk that outlive a process: calibration, timings, what tuning found.

A document that cannot be read is as good as none, with one warning: nothing kept here may stop a training run.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from remat.errors import RematWarning

try:
    import fcntl
except ImportError:  # Windows: updates at the same time may lose one of the two, never tear a document
    fcntl = None  # type: ignore[assignment]

FORMAT_VERSION: Final = 1
Document = dict[str, Any]
_warned: set[Path] = set()


@dataclass(frozen=True)
class Store:
    """The folder of the documents; it is made when the first one is written."""

    folder: Path

    def path(self, name: str) -> Path:
        """Where the document of this name lies, whether it is there or not."""
        return self.folder / name

    def read(self, name: str) -> Document | None:
        """The document, or None where there is none; also, with one warning a path and process, for a broken one."""
        path = self.path(name)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            warn_ignored(path, f"{type(error).__name__}: {error}")
            return None
        if not isinstance(found, dict):
            warn_ignored(path, f"it holds a {type(found).__name__}, no document")
            return None
        if found.get("format") != FORMAT_VERSION:
            warn_ignored(path, f"its format is {found.get('format')!r}, this version's {FORMAT_VERSION}")
            return None
        return found

    def update(self, name: str, change: Callable[[Document | None], Document]) -> Document:
        """Put what `change` makes of the document in its place, whole or not at all; returns the new one.

        Under a lock that other processes respect, so that none loses what another wrote; `change` is called once, and
        must not update the same document. Where nothing can be written: one warning, and the new one is returned.
        """
        path = self.path(name)
        with _locked(path):
            changed = {**change(self.read(name)), "format": FORMAT_VERSION}
            text = json.dumps(changed, indent=1)
            try:
                _replace(path, text)
            except OSError as error:
                warn_once(self.folder, f"remat keeps nothing in {self.folder}: {type(error).__name__}: {error}")
        return changed


def open_store(cache_dir: str | None) -> Store:
    """The store in this folder; None: `remat` in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache)."""
    if cache_dir is not None:
        return Store(Path(os.path.expanduser(cache_dir)))
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    if not os.path.isabs(caches):  # a user without a home, as in many containers
        caches = tempfile.gettempdir()
    return Store(Path(caches) / "remat")


def warn_ignored(path: Path, reason: str) -> None:
    """Say once that a document is not used, why, and how to make it anew."""
    warn_once(
        path,
        f"{path} is ignored ({reason}); delete it, or make it anew by `python -m remat calibrate --refresh`",
    )


def warn_once(path: Path, message: str) -> None:
    """A RematWarning, once for each path in a process."""
    if path not in _warned:
        _warned.add(path)
        warnings.warn(message, RematWarning, stacklevel=2)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a document, in a file beside it that is never replaced."""
    with ExitStack() as stack:
        # Without a lock where there can be none (some network file systems); where nothing can be written, the writing
        # itself tells.
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.with_name(path.name + ".lock").open("a"))
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        try:
            file.write(text)
            file.close()
            os.replace(file.name, path)
        except OSError:
            with suppress(OSError):
                os.unlink(file.name)
            raise
