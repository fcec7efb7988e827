"""Writes the figures of the README and of docs/kernels.md from the JSON in benchmarks/results: none is typed by hand.

usage: python -m benchmarks.readme

A line such as ``<!-- figures: cpu -->`` is followed by a table; the table is made anew from ``results/cpu/*.json``,
which benchmarks wrote with ``--json``. ``<!-- ladder: gemm NN -->`` is followed by the variants of an operation as
``results/h200/ladders.json`` has them, each with the note that stands beside it in its code.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from numstack.kernels.variants import Variant, Variants

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "kernels.md")


class Figure(NamedTuple):
    """A line of a table: where its figures are found, and those of a peer measured in the same run.

    ``row`` is a row's first cells as they are printed, as many as it takes; ``peer`` likewise, or "" for none.
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
        Figure("compiling a kernel, median", "simt", "compiling a kernel, median of 22", "figure", "s"),
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
        Figure(
            "training GPT-2 124M, batch 32, bf16",
            "gpt2",
            "numstack eager",
            "tokens/s",
            "tokens/s",
            "PyTorch 2.11.0+cu130 eager",
            "",
            f"{TORCH}, eager",
        ),
        Figure(
            "its peak memory",
            "gpt2",
            "numstack eager",
            "peak GiB",
            "GiB",
            "PyTorch 2.11.0+cu130 eager",
            "",
            f"{TORCH}, eager",
        ),
        Figure(
            "its loss after 200 steps on Shakespeare",
            "gpt2_loss",
            "200",
            "numstack",
            "",
            "200",
            "PyTorch, median of 5",
            f"{TORCH}, median of five runs",
        ),
        Figure("GEMM, 32 products, of cuBLAS's speed", "gemm", "geometric mean all but float32", "worse ratio", ""),
        Figure(
            "attention B64 H12 T1024 D64, forward",
            "attention",
            "124M B64 H12 T1024 D64 True forward wgmma",
            "TFLOP/s",
            "TFLOP/s",
            "124M B64 H12 T1024 D64 True forward wgmma",
            "cuDNN",
            "cuDNN",
        ),
        Figure(
            "the same, backward",
            "attention",
            "124M B64 H12 T1024 D64 True backward wgmma",
            "TFLOP/s",
            "TFLOP/s",
            "124M B64 H12 T1024 D64 True backward wgmma",
            "cuDNN",
            "cuDNN",
        ),
        Figure(
            "LayerNorm 65536 x 768, forward",
            "membound",
            "layernorm forward",
            "GB/s",
            "GB/s",
            "layernorm forward",
            "PyTorch GB/s",
            TORCH,
        ),
        Figure("AdamW, 124M parameters", "membound", "adamw", "GB/s", "GB/s", "adamw", "PyTorch GB/s", TORCH),
        Figure("import to first step of GPT-2 124M, warm", "start", "first step done", "warm", "s"),
        Figure("the same with an empty cache", "start", "first step done", "cold", "s"),
        Figure("all-reduce of 1 GiB on two GPUs, NCCL", "allreduce", "1073741824", "nccl GB/s", "GB/s bus bandwidth"),
    ],
}


FIGURES["h200/gemm"] = [
    Figure(f"{what}, {which}", "gemm", f"{row} {kind}", column, "")
    for kind, what, column in (
        ("all but float32", "of cuBLAS's speed", "worse ratio"),
        ("all but float32", "of cuBLAS's speed on the same arrays", "ratio"),
        ("dw float32", "of cuBLAS's speed, gradients of weights in float32", "worse ratio"),
        ("bias + GeLU", "of cuBLAS's speed followed by torch.compile's bias + GeLU", "worse ratio"),
        ("all but float32", "mma_sync: of cuBLAS's speed", "its ratio"),
        ("flag", "with the flag for what is not finite: of the speed without", "ratio"),
    )
    for row, which in (("geometric mean", "geometric mean"), ("worst", "worst"))
]
FIGURES["h200/attention"] = [
    Figure(f"{shape}, {which}, {variant}", "attention", row, "TFLOP/s", "TFLOP/s", row, peer, peer)
    for shape in ("124M B64 H12 T1024 D64", "1.5B B16 H25 T1024 D64", "long B4 H16 T8192 D128")
    for which, variant in (("forward", "mma_sync"), ("forward", "wgmma"), ("backward", "wgmma"))
    for row in (f"{shape} True {which} {variant}",)
    for peer in ("flash" if variant == "mma_sync" else "cuDNN",)
]
FIGURES["h200/membound"] = [
    Figure(f"{row}, {share}", "membound", row, "GB/s", "GB/s", row, "PyTorch GB/s", TORCH)
    for row, share in (
        ("layernorm forward", "65536 x 768"),
        ("layernorm backward", "65536 x 768"),
        ("layernorm forward, float32 stream", "65536 x 768"),
        ("layernorm backward into float32 stream", "65536 x 768"),
        ("softmax forward", "65536 x 1024"),
        ("cross-entropy and gradient in place", "16384 x 50304"),
        ("gelu forward", "65536 x 3072"),
        ("adamw", "124M parameters"),
        ("bias gradient", "65536 x 3072"),
        ("bias gradient and cast to bfloat16", "65536 x 768"),
        ("transpose", "65536 x 3072"),
        ("embedding forward", "32 x 1024 x 768"),
        ("embedding forward, float32", "32 x 1024 x 768"),
        ("embedding backward, tokens", "32 x 1024 x 768"),
        ("embedding backward, tokens and positions", "32 x 1024 x 768"),
        ("embedding backward, tokens and positions, float32", "32 x 1024 x 768"),
    )
]
# Operations whose rate of arithmetic says something; the others wait for memory.
WAIT_FOR_ARITHMETIC = ("gemm", "attention")
NOT_MEASURED = "*Not measured yet.*"


def is_measured(machine: str, benchmark: str) -> bool:
    """Whether there is JSON of it."""
    return (RESULTS / machine / f"{benchmark}.json").exists()


def cell(machine: str, benchmark: str, row: str, column: str) -> float:
    """One figure of a benchmark's JSON."""
    document = json.loads((RESULTS / machine / f"{benchmark}.json").read_text())
    for found in document["rows"]:
        cells = list(map(str, found.values()))
        if row in (" ".join(cells[: n + 1]) for n in range(len(cells))):
            return float(found[column])
    raise SystemExit(
        f"{machine}/{benchmark}.json has no row {row!r}; it has {[list(r.values())[:2] for r in document['rows']]}"
    )


def table(which: str) -> str:
    """The table of a machine, or of one of its subjects, in Markdown: ``h200``, ``h200/gemm``."""
    machine = which.partition("/")[0]
    if not any(is_measured(machine, figure.benchmark) for figure in FIGURES[which]):
        return NOT_MEASURED
    lines = ["| what | numstack | a peer in the same run | command |", "|---|---|---|---|"]
    for figure in FIGURES[which]:
        ours = cell(machine, figure.benchmark, figure.row, figure.column)
        theirs = ""
        if figure.peer:
            value = cell(machine, figure.benchmark, figure.peer, figure.peer_column or figure.column)
            theirs = f"{figure.peer_name}: {number(value)} {figure.unit}".rstrip()
        command = f"`numstack bench {figure.benchmark}`"
        lines.append(f"| {figure.what} | {number(ours)} {figure.unit}".rstrip() + f" | {theirs} | {command} |")
    return "\n".join(lines)


def ladder(operation: str) -> str:
    """The variants of an operation, plainest first: what each fixes, where it is, and what it took if that is known."""
    if not is_measured("h200", "ladders"):
        told = [f"| {' | '.join(_told(operation, name))} |" for name in _names(operation)]
        return "\n".join(["| variant | what it changes |", "|---|---|", *told]) if told else NOT_MEASURED
    document = json.loads((RESULTS / "h200" / "ladders.json").read_text())
    rows = [row for row in document["rows"] if row["operation"] == operation]
    if not rows:
        raise SystemExit(f"h200/ladders.json has no operation {operation!r}")
    are_variants = not operation.endswith(" steps")  # steps within a variant say all in their names
    has_rate = operation.startswith(WAIT_FOR_ARITHMETIC)
    columns = ["variant", "what it changes", "time"] if are_variants else ["step", "time"]
    columns += ["rate"] if has_rate else []
    lines = [f"| {' | '.join([*columns, 'times as fast'])} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = _told(operation, row["variant"]) if are_variants else [row["variant"]]
        cells.append(f"{number(row['ms'])} ms")
        cells += [f"{number(row['TFLOP/s'])} TFLOP/s"] if has_rate else []
        cells.append(number(row["step"]) if row["step"] != "" else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _told(operation: str, name: str) -> list[str]:
    """A variant's name with a link to its code, and its note."""
    variant = _variant(operation, name)
    place = Path(importlib.import_module(_home(variant.launch)).__file__ or "").resolve().relative_to(ROOT)
    return [f"[`{variant.name}`](../{place})", variant.note]


def _home(launch: Any) -> str:
    """The module of a launcher; of one that goes on to a variant's, that of the variant's."""
    launch = getattr(launch, "func", launch)  # of a functools.partial the function
    inner = [cell.cell_contents for cell in launch.__closure__ or () if isinstance(cell.cell_contents, Variant)]
    return _home(inner[0].launch) if inner else str(launch.__module__)


def _tables(operation: str) -> list[Variants]:
    """The ladders of the file whose operation it is: ``attention.forward D=64``."""
    file, _, which = operation.split()[0].partition(".")
    members = vars(importlib.import_module(f"numstack.kernels.{file}"))
    tables = {name: table for name, table in members.items() if isinstance(table, Variants)}
    return [table for name, table in tables.items() if _fits(name, which)] or list(tables.values())[:1]


def _names(operation: str) -> list[str]:
    """Names of its variants, plainest first; none of steps within one."""
    return [] if operation.endswith(" steps") else _tables(operation)[0].names()


def _variant(operation: str, name: str) -> Variant:
    for table in _tables(operation):
        for variant in table:
            if variant.name == name:
                return variant
    raise SystemExit(f"{operation} has no variant {name!r} any more: run benchmarks.ladders again")


def _fits(table: str, which: str) -> bool:
    """Whether a table's name, such as TRANSPOSE_VARIANTS, is that of a function, such as transpose."""
    return table.removesuffix("_VARIANTS").lower() == which


def number(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rendered(text: str) -> str:
    """A page with its tables made anew."""
    made = {"figures": table, "ladder": ladder}

    def replace(match: re.Match[str]) -> str:
        return f"{match.group(1)}\n\n{made[match.group(2)](match.group(3))}\n\n"

    made_before = rf"(?:(?:\||{re.escape(NOT_MEASURED)}).*\n)*"
    return re.sub(rf"(<!-- (figures|ladder): ([^>]+?) -->)\n\n{made_before}\n?", replace, text)


def main() -> None:
    for path in PAGES:
        path.write_text(rendered(path.read_text()))


if __name__ == "__main__":
    main()
