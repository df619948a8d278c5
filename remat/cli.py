"""`remat` and `python -m remat`: what a user asks the package itself."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from remat import settings


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="remat", description="The remat backend of torch.compile.")
    commands = parser.add_subparsers(dest="command", required=True)
    flags = commands.add_parser("flags", help="print every setting")
    flags.add_argument("--markdown", action="store_true", help="as the README shows it")
    chosen = parser.parse_args(arguments)
    print_flags(chosen.markdown)
    return 0


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
