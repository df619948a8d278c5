"""`remat` and `python -m remat`: what a user asks the package itself."""

from __future__ import annotations

import argparse
import dataclasses

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from remat import settings
from remat.calibrate import Calibration, calibrate
from remat.devices import Device
from remat.errors import SettingError
from remat.settings import Settings
from remat.snapshot import Snapshot, load


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="remat", description="The remat backend of torch.compile.")
    commands = parser.add_subparsers(dest="command", required=True)
    flags = commands.add_parser("flags", help="print every setting")
    flags.add_argument("--markdown", action="store_true", help="as the README shows it")
    measure = commands.add_parser("calibrate", help="measure this machine, and keep the figures for later compilations")
    measure.add_argument("--refresh", action="store_true", help="forget the operators timed so far")
    show = commands.add_parser("figures", help="print the figures that prices are made from")
    for command in (measure, show):
        default = "cuda" if torch.cuda.is_available() else "cpu"
        command.add_argument("--device", type=_device, default=default, help=f"now {default}")
        command.add_argument("--cache-dir", help="the folder that they are kept in; else the setting cache_dir")
    chosen = parser.parse_args(arguments)
    if chosen.command == "flags":
        print_flags(chosen.markdown)
        return 0
    try:
        resolved, _ = settings.resolve({} if chosen.cache_dir is None else {"cache_dir": chosen.cache_dir})
    except SettingError as error:
        parser.error(str(error))
    if chosen.command == "calibrate":
        return run_calibration(chosen.device, resolved, chosen.refresh)
    print_figures(load(chosen.device, resolved))
    return 0


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:  # argparse knows what to say of a ValueError
        raise ValueError(text) from error


def print_flags(as_markdown: bool) -> None:
    """Print the table of settings."""
    if as_markdown:
        print(settings.markdown())
        return
    table = Table()
    for heading in ("option", "variable"):
        table.add_column(heading, no_wrap=True, overflow="ignore")
    for heading in ("default", "allowed", "what it does", "in cache key"):
        table.add_column(heading)
    for row in settings.rows():
        table.add_row(*row)
    Console().print(table)


def run_calibration(device: torch.device, resolved: Settings, refresh: bool) -> int:
    """Calibrate under a progress bar on stderr, and print what was found; returns the exit status."""
    errors = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    try:
        with Progress(*columns, console=errors, transient=True) as bar:
            task = bar.add_task("calibrating", total=1.0)
            found = calibrate(
                device, resolved, lambda what, done: bar.update(task, description=what, completed=done), refresh
            )
    except ValueError as error:
        errors.print(str(error), markup=False)
        return 1
    print_calibration(found)
    return 0


def print_calibration(found: Calibration) -> None:
    """Print measured figures beside the built-in ones, where they are, and how well operators are predicted."""
    console = Console()
    table = Table("figure", "measured", "built in")
    mine, built_in = _rows(found.device), _rows(found.built_in)
    for name, value in mine.items():
        table.add_row(name, value, built_in.get(name, ""))
    console.print(table)
    kept = f"kept in {found.path}" if found.snapshot.device == found.device else "not kept: nothing can be written"
    lines = [*found.notes, kept, f"hash {found.snapshot.hash}", f"took {found.seconds:.1f} s"]
    if found.learned is not None:
        for family, error in found.learned.error.items():
            roofline = found.learned.roofline_error[family]
            lines.append(f"{family}: learned prices are off by {error:.0%}, the roofline's by {roofline:.0%} (median)")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_figures(snapshot: Snapshot) -> None:
    """Print the snapshot that a compilation here would use."""
    console = Console()
    table = Table("figure", snapshot.origin)
    for name, value in _rows(snapshot.device).items():
        table.add_row(name, value)
    console.print(table)
    console.print(f"{snapshot.origin}, hash {snapshot.hash}", markup=False, highlight=False)


def _rows(device: Device) -> dict[str, str]:
    """Every figure as text by its name; tables of figures row by row."""
    rows: dict[str, str] = {}
    for field in dataclasses.fields(device):
        value = getattr(device, field.name)
        if isinstance(value, tuple):
            rows |= {f"{field.name}: {key}": f"{rate:.3g}" for key, rate in value}
        elif field.name != "processor":
            rows[field.name] = f"{value:.3g}" if isinstance(value, float) else str(value)
    return rows
