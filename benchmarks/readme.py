"""Writes the README's figures from the JSON in benchmarks/results, so that none is typed by hand.

usage: python -m benchmarks.readme

A line of the README such as ``<!-- figures: cpu -->`` is followed by a table; the table is made anew from
``results/cpu/*.json``, which benchmarks wrote with ``--json``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Figure(NamedTuple):
    """A line of a table: where its figures are found, and those of a peer measured in the same run.

    ``row`` is a row's first cell, or its first two, as they are printed; ``peer`` likewise, or "" for none.
    """

    what: str
    benchmark: str
    row: str
    column: str
    unit: str
    peer: str = ""
    peer_column: str = ""
    peer_name: str = ""


FIGURES = {
    "cpu": [
        Figure("16 x 16 shared tiles, 512^3", "simt", "shared tile 512^3", "value", "GFLOP/s"),
    ],
    "h200": [],
}


def cell(machine: str, benchmark: str, row: str, column: str) -> float:
    """One figure of a benchmark's JSON."""
    document = json.loads((RESULTS / machine / f"{benchmark}.json").read_text())
    for found in document["rows"]:
        cells = list(map(str, found.values()))
        if row in (cells[0], " ".join(cells[:2])):
            return float(found[column])
    raise SystemExit(f"{machine}/{benchmark}.json has no row {row!r}; it has {[list(r.values())[:2] for r in document['rows']]}")


def table(machine: str) -> str:
    """The table of a machine, in Markdown."""
    lines = ["| what | numstack | a peer in the same run | command |", "|---|---|---|---|"]
    for figure in FIGURES[machine]:
        ours = cell(machine, figure.benchmark, figure.row, figure.column)
        theirs = ""
        if figure.peer:
            value = cell(machine, figure.benchmark, figure.peer, figure.peer_column or figure.column)
            theirs = f"{figure.peer_name}: {number(value)} {figure.unit}"
        command = f"`numstack bench {figure.benchmark}`"
        lines.append(f"| {figure.what} | {number(ours)} {figure.unit} | {theirs} | {command} |")
    return "\n".join(lines)


def number(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rendered(text: str) -> str:
    """A README with its tables made anew."""

    def replace(match: re.Match[str]) -> str:
        return f"{match.group(1)}\n\n{table(match.group(2))}\n"

    return re.sub(r"(<!-- figures: (\w+) -->)\n\n(?:\|.*\n)*", replace, text)


def main() -> None:
    path = ROOT / "README.md"
    path.write_text(rendered(path.read_text()))


if __name__ == "__main__":
    main()
