"""What prices are made from, settled once for each compilation: figures of the device, and what was learned of it.

Two processes with the same documents in the store make the same plans, and the hash tells the compile cache which
documents those were. Nothing is measured here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from remat import devices, measured
from remat.devices import Device
from remat.learned import Learned
from remat.settings import Settings
from remat.store import Document, Store, open_store, warn_ignored

BUILT_IN: Final = "built in"
CALIBRATED: Final = "calibrated"
_CPU_TABLE: Final = Path("/proc/cpuinfo")
_T = TypeVar("_T")
_Stamp = tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """What measurements hold for: a device, a release of torch, a number of threads."""

    device: str
    torch: str
    threads: int

    @property
    def key(self) -> str:
        """Its part of a document's name."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.device} torch {self.torch} {self.threads} threads").strip("-")

    @property
    def calibration_name(self) -> str:
        """The document with figures and what was learned."""
        return f"calibration-{self.key}.json"


# By path and machine: when the file was written, its bytes, and what it held.
_parsed: dict[tuple[Path, Machine], tuple[_Stamp, Any]] = {}


@dataclass(frozen=True)
class Snapshot:
    """Figures of the device, `built in` or `calibrated`, and what was learned of it (for `cost=learned` only).

    hash: 16 hex digits of both, and of which timings there are where the setting `cost` has use for them.
    """

    device: Device
    origin: str
    learned: Learned | None
    hash: str


def load(device: torch.device, settings: Settings) -> Snapshot:
    """The snapshot for this device from the store of the settings; built-in figures where none fit."""
    figures, origin, learned, generation = devices.figures(device), BUILT_IN, None, ""
    machine = machine_of(device)
    if machine is not None:
        store = open_store(settings.cache_dir)
        stored = _read(store, machine.calibration_name, machine, _calibration_of)
        if stored is not None:
            (figures, fitted), origin = stored, CALIBRATED
            learned = fitted if settings.cost == "learned" else None
        if settings.cost != "roofline":
            name = timings_name(device, machine)
            generation = _read(store, name, machine, _generation_of) or ""
            if not generation and settings.cost == "profile":
                # The document must be there before the first compilation, or the second would have another hash.
                measured.add(store, name, [])
                generation = _read(store, name, machine, _generation_of) or ""
    fields = [figures.as_dict(), None if learned is None else learned.to_dict(), generation]
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return Snapshot(figures, origin, learned, digest[:16])


def machine_of(device: torch.device) -> Machine | None:
    """What measurements on this device hold for; None where nothing can be measured: a GPU not here, or pretended."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        return Machine(_processor_name(), torch.__version__, threads)
    if device.type == "cuda" and not devices._pretended and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        return Machine(f"{torch.cuda.get_device_name(device)} sm_{major}{minor}", torch.__version__, threads)
    return None


def timings_name(device: torch.device, machine: Machine) -> str:
    """The document with timed operators; TF32, where there is such a thing, has one of its own."""
    precision = f"-{torch.get_float32_matmul_precision()}" if device.type == "cuda" else ""
    return f"timings-{machine.key}{precision}.json"


@functools.cache
def _processor_name() -> str:
    """The model of the CPU with a hash of what it can do, which virtual machines hide in part."""
    lines = _CPU_TABLE.read_text(errors="replace").splitlines() if _CPU_TABLE.exists() else []
    table = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    name = table.get("model name") or platform.processor() or platform.machine()
    abilities = table.get("flags") or table.get("Features") or ""
    return f"{name} {hashlib.sha256(abilities.encode()).hexdigest()[:8]}"


def _read(store: Store, name: str, machine: Machine, parse: Callable[[Document, Machine], _T]) -> _T | None:
    """A document as `parse` has it; None with a warning for a ValueError, which tells why it is ignored."""
    path = store.path(name)
    try:
        status = path.stat()
    except OSError:
        store.read(name)  # mostly there is none; it warns where it is something worse
        return None
    stamp = status.st_mtime_ns, status.st_size
    known = _parsed.get((path, machine))
    if known is not None and known[0] == stamp:
        return known[1]
    found: _T | None = None
    document = store.read(name)
    if document is not None:
        try:
            found = parse(document, machine)
        except ValueError as error:
            warn_ignored(path, str(error))
    _parsed[path, machine] = stamp, found
    return found


def _calibration_of(document: Document, machine: Machine) -> tuple[Device, Learned | None]:
    recorded = {field: document.get(field) for field in dataclasses.asdict(machine)}
    if recorded != dataclasses.asdict(machine):
        raise ValueError(f"it was measured on another machine: {recorded}, here {dataclasses.asdict(machine)}")
    figures = document.get("figures")
    if not isinstance(figures, dict):
        raise ValueError("it holds no figures")
    device = Device.from_dict(figures)
    _check_figures(device)
    learned = document.get("learned")
    return device, None if learned is None else Learned.from_dict(learned)


def _check_figures(device: Device) -> None:
    """Raise ValueError for a figure that is no finite number >= 0; `from_dict` looks at the oldest rates only."""
    fields = {name: value for name, value in vars(device).items() if name not in ("name", "processor")}
    tables = [value for value in fields.values() if isinstance(value, tuple)]
    numbers = [value for value in fields.values() if not isinstance(value, tuple)]
    for number in [*numbers, *(rate for table in tables for _, rate in table)]:
        if not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
            raise ValueError(f"a figure that is none: {number!r}")


def _generation_of(document: Document, machine: Machine) -> str:
    generation = document.get("generation")
    return generation if isinstance(generation, str) else ""
