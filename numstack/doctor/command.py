"""The command line of ``numstack doctor``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from numstack.doctor.diagnosis import Line, diagnose
from numstack.doctor.facts import gather

SIGNS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page, or JSON; returns 1 if there is an error."""
    parser = argparse.ArgumentParser(
        prog="numstack doctor", description="Say whether this machine is fit to train, and what to do where it is not."
    )
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    options = parser.parse_args(arguments)
    facts = gather()
    lines = diagnose(facts)
    if options.json:
        print(json.dumps({"facts": asdict(facts), "findings": [asdict(line) for line in lines]}, indent=1))
    else:
        _print(lines)
    return 1 if any(line.status == "error" for line in lines) else 0


def _print(lines: list[Line]) -> None:
    table = Table("", "", show_header=False, box=None, pad_edge=False)
    table.add_column(overflow="fold")
    for line in lines:
        text = line.text + (f"\n[bold]{line.advice}[/]" if line.advice else "")
        table.add_row(SIGNS[line.status], line.topic, text)
    console = Console()
    console.print(table)
    counts = {status: sum(line.status == status for line in lines) for status in SIGNS}
    console.print(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors")
