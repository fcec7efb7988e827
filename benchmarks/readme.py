"""Writes the README's figures from the JSON in benchmarks/results, so that none is typed by hand.

usage: python -m benchmarks.readme

A line of the README such as ``<!-- figures: cpu -->`` is followed by a table; the table is made anew from
``results/cpu/*.json``, which benchmarks wrote with ``--json``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

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


TORCH = "PyTorch"
NUMBA = "numba's launcher"

FIGURES = {
    "cpu": [
        Figure(
            "training the example, 2 cores",
            "cpu_gpt",
            "numstack, 2 ranks",
            "tokens/s",
            "tokens/s",
            "PyTorch 2.13.0+cpu, 2 threads",
            "",
            TORCH,
        ),
        Figure("GEMM 512^3, 16 x 16 shared tiles", "simt", "GEMM 512^3, 16 x 16 shared tiles", "figure", "GFLOP/s"),
        Figure(
            "GEMM 768 x 128 x 512, register tiles",
            "gemm",
            "mlp down 768",
            "register_tile",
            "GFLOP/s",
            "mlp down 768",
            "torch",
            TORCH,
        ),
        Figure(
            "attention B12 H4 T128 D32, forward",
            "attention",
            "B12 H4 T128 D32 online_tiles",
            "forward",
            "GFLOP/s",
            "B12 H4 T128 D32 torch",
            "",
            TORCH,
        ),
        Figure(
            "the same, backward",
            "attention",
            "B12 H4 T128 D32 online_tiles",
            "backward",
            "GFLOP/s",
            "B12 H4 T128 D32 torch",
            "",
            TORCH,
        ),
        Figure(
            "LayerNorm 4096 x 768, forward",
            "layernorm",
            "forward warp_per_row 4096 x 768",
            "GB/s",
            "GB/s",
            "forward torch 4096 x 768",
            "",
            TORCH,
        ),
        Figure("AdamW, 8M parameters", "adamw", "numstack 8000000", "GB/s", "GB/s", "torch fused 8000000", "", TORCH),
        Figure("GEMM 64^3 against numba's simulator", "simt", "  times as fast as that", "figure", "times as fast"),
        Figure("compiling a kernel, median", "simt", "compiling a kernel, median of 21", "figure", "s"),
        Figure("loading it from the cache", "simt", "loading it from the cache", "figure", "ms"),
    ],
    "h200": [
        Figure(
            "host cost of a launch, six arrays",
            "launch",
            "numstack, six arrays, through the door",
            "us",
            "µs",
            "numba, six arrays",
            "",
            NUMBA,
        ),
        Figure(
            "the same beside torch.add",
            "launch",
            "numstack, six arrays, through the door",
            "us",
            "µs",
            "PyTorch, torch.add(x, y, out=out)",
            "",
            TORCH,
        ),
        Figure("import to first step of GPT-2 124M, warm", "start", "first step done", "warm", "s"),
        Figure("the same with an empty cache", "start", "first step done", "cold", "s"),
        Figure("all-reduce of 1 GiB on two GPUs, NCCL", "allreduce", "1073741824", "nccl GB/s", "GB/s bus bandwidth"),
        Figure("AdamW, 8M parameters", "adamw", "numstack 8000000", "GB/s", "GB/s"),
        Figure("LayerNorm 4096 x 768, forward", "layernorm", "forward warp_per_row 4096 x 768", "GB/s", "GB/s"),
        Figure("transpose through shared memory", "elementwise", "transpose, shared_tile", "numstack", "GB/s"),
    ],
}


def cell(machine: str, benchmark: str, row: str, column: str) -> float:
    """One figure of a benchmark's JSON."""
    document = json.loads((RESULTS / machine / f"{benchmark}.json").read_text())
    for found in document["rows"]:
        cells = list(map(str, found.values()))
        if row in (cells[0], " ".join(cells[:2])):
            return float(found[column])
    raise SystemExit(
        f"{machine}/{benchmark}.json has no row {row!r}; it has {[list(r.values())[:2] for r in document['rows']]}"
    )


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
        return f"{match.group(1)}\n\n{table(match.group(2))}\n\n"

    return re.sub(r"(<!-- figures: (\w+) -->)\n\n(?:\|.*\n)*\n?", replace, text)


def main() -> None:
    path = ROOT / "README.md"
    path.write_text(rendered(path.read_text()))


if __name__ == "__main__":
    main()
