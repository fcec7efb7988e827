"""Matrix products: on a GPU the variants of numstack.kernels.gemm beside cuBLAS, on a CPU beside NumPy's BLAS.

usage: python -m benchmarks.gemm [--json PATH] [--shapes 124M 1.5B square gelu] [--passes forward dx dw] [--runs N]
       python -m benchmarks.gemm --compile      ahead, on any machine: compiling takes longer than measuring
       NUMSTACK_THREADS=1 OPENBLAS_NUM_THREADS=1 python -m benchmarks.gemm [--json PATH]      for one core of a CPU

On a GPU: the shapes of GPT-2 124M (65536 tokens, half for the head) and 1.5B (16384), forward and both gradients, and
squares; bfloat16, normal random numbers, float32 sums. The peer is cuBLAS through PyTorch on the same arrays (weights
[in, out], as GPT-2 has them) and on the layout it likes best (weights [out, in]), in turns with ours, so that clocks
and heat are the same for all; ratios above 1 say that numstack is faster. "worse ratio" is to the faster of both. The
gradients of weights are stored as bfloat16 on both sides ("dw") and as float32 ("dw float32"). Errors are relative to
float64, Frobenius norm, over 64 random rows and 512 columns. Fused bias + GeLU, which keeps what went into the GeLU,
is compared with cuBLAS followed by torch.compile's bias + GeLU. "flag" rows compare numstack with itself without the
flag for what is not finite. Last, geometric means and the worst of each ratio.

On a CPU: the shapes of a small GPT (12 x 64 tokens, width 128, 84 characters), in all three layouts, and 512^3, in
GFLOP/s.
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.device import current_device, offline
from numstack.kernels.gemm import VARIANTS, gemm, workspace_size

# --- on a CPU --------------------------------------------------------------------------------------------------------

TOKENS, WIDTH, VOCABULARY = 12 * 64, 128, 84
CPU_SHAPES = {
    "square": (512, 512, 512),
    "qkv": (TOKENS, 3 * WIDTH, WIDTH),
    "projection": (TOKENS, WIDTH, WIDTH),
    "mlp up": (TOKENS, 4 * WIDTH, WIDTH),
    "mlp down": (TOKENS, WIDTH, 4 * WIDTH),
    "mlp up, weight gradient": (WIDTH, 4 * WIDTH, TOKENS),
    "head": (TOKENS, VOCABULARY, WIDTH),
}


def on_cpu(options: Any) -> None:
    torch = harness.one_threaded_torch()
    variants = [v.name for v in VARIANTS if v.made_for == "any"]
    columns = ["shape", "m", "n", "k", "layout", *variants, "numpy", *(["torch"] if torch else [])]
    rows: list[list[Any]] = []
    for what, (m, n, k) in CPU_SHAPES.items():
        for layout in ("TN",) if what.endswith("weight gradient") else ("NN", "NT"):
            rng = np.random.default_rng(0)
            a = rng.standard_normal((k, m) if layout[0] == "T" else (m, k), dtype=np.float32)
            b = rng.standard_normal((n, k) if layout[1] == "T" else (k, n), dtype=np.float32)
            rows.append([what, m, n, k, layout, *gflops(a, b, layout, 2e-9 * m * n * k, variants, torch)])
    harness.report("gemm", columns, rows, options)


def gflops(a: np.ndarray, b: np.ndarray, layout: str, gflop: float, variants: list[str], torch: Any) -> list[float]:
    """GFLOP/s of every variant, of NumPy, and of PyTorch if given."""
    left, right = (a.T if layout[0] == "T" else a), (b.T if layout[1] == "T" else b)
    out = np.empty((left.shape[0], right.shape[1]), np.float32)
    device_a, device_b, device_c = memory.from_host(a), memory.from_host(b), memory.empty(out.shape, np.float32)
    results = []
    for variant in variants:
        run = partial(gemm, device_a, device_b, device_c, layout=layout, variant=variant)
        results.append(gflop / harness.median_s(run))
    results.append(gflop / harness.median_s(lambda: np.matmul(left, right, out=out)))
    if torch is not None:
        tensors = [torch.from_numpy(x) for x in (left, right, out)]
        results.append(gflop / harness.median_s(lambda: torch.matmul(tensors[0], tensors[1], out=tensors[2])))
    return results


# --- on a GPU --------------------------------------------------------------------------------------------------------

VOCABULARY_PADDED = 50304
MODELS = {"124M": (768, 65536, 32768), "1.5B": (1600, 16384, 16384)}  # width, tokens, tokens that reach the head
SQUARES = (4096, 8192)
PASSES = ("forward", "dx", "dw", "dw float32")
GROUPS = (*MODELS, "square", "gelu", "flag")
FLAG_RUNS = 400  # for a difference of a few thousandths
SAMPLED_ROWS, SAMPLED_COLUMNS = 64, 512

COLUMNS = (
    *("shape", "pass", "m", "n", "k", "layout", "TFLOP/s", "cuBLAS", "ratio", "cuBLAS [out, in]", "ratio to it"),
    *("worse ratio", "mma.sync", "its ratio", "error", "cuBLAS error"),
)


class Product(NamedTuple):
    """c = op(a) op(b), as numstack computes it, and whether a model's weight is stored [in, out] in it."""

    shape: str
    what: str
    m: int
    n: int
    k: int
    layout: str
    has_weight_in_out: bool

    @property
    def tflop(self) -> float:
        return 2e-12 * self.m * self.n * self.k


def products(groups: list[str], passes: list[str]) -> Iterator[Product]:
    """Every product of the GPT-2 models of ``groups``, and the squares if they are asked for."""
    for model, (width, tokens, head_tokens) in MODELS.items():
        if model not in groups:
            continue
        sizes = {  # of a linear layer: tokens, inputs, outputs
            "qkv": (tokens, width, 3 * width),
            "proj": (tokens, width, width),
            "fc": (tokens, width, 4 * width),
            "fc2": (tokens, 4 * width, width),
            "head": (head_tokens, width, VOCABULARY_PADDED),
        }
        for name, (t, i, o) in sizes.items():
            is_head = name == "head"  # its weight is the token table, [out, in]
            for what in passes:
                m, n, k, layout = {
                    "forward": (t, o, i, "NT" if is_head else "NN"),
                    "dx": (t, i, o, "NN" if is_head else "NT"),
                }.get(what, (o, i, t, "TN") if is_head else (i, o, t, "TN"))
                yield Product(f"{model} {name}", what, m, n, k, layout, not is_head)
    if "square" in groups and "forward" in passes:
        for size in SQUARES:
            yield Product(f"{size}^3", "forward", size, size, size, "NN", True)


def on_gpu(options: Any) -> None:
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    work = [partial(measured, torch, product, options) for product in products(options.shapes, options.passes)]
    if "gelu" in options.shapes:
        work += [partial(measured_gelu, torch, model, options) for model in MODELS]
    if "flag" in options.shapes:
        work += [partial(measured_flag, torch, model, options) for model in MODELS]
    rows: list[list[Any]] = []
    end = time.monotonic() + options.seconds
    for measure in work:
        if time.monotonic() > end:
            print(f"stopped after {options.seconds} s, {len(work) - len(rows)} rows before the end", flush=True)
            break
        rows.append(measure())
        print(*(f"{value:.4g}" if isinstance(value, float) else value for value in rows[-1]), flush=True)
    harness.report("gemm", COLUMNS, rows + summary(rows), options)


def compile_ahead(options: Any) -> None:
    """Compile for Hopper all that on_gpu launches, on a machine that need not have a GPU."""
    with offline.device("sm_90a") as device:
        bfloat16 = np.dtype(np.uint16)
        variants = [options.variant, *([mma_variant()] if options.mma else [])]

        def compiled(product: Product, **epilogue: Any) -> None:
            _, what, m, n, k, layout, _ = product
            a = device.array((k, m) if layout[0] == "T" else (m, k), bfloat16)
            b = device.array((n, k) if layout[1] == "T" else (k, n), bfloat16)
            c = device.array((m, n), np.float32 if what == "dw float32" else bfloat16)
            workspace = device.array((most_workspace(m, n, k, layout, variants),))
            for variant in variants:
                gemm(a, b, c, layout=layout, variant=variant, workspace=workspace, **epilogue)

        for product in products(options.shapes, options.passes):
            compiled(product)
        for model, (width, tokens, _) in MODELS.items():
            product = Product(f"{model} fc", "forward", tokens, 4 * width, width, "NN", True)
            bias, kept = device.array((4 * width,), bfloat16), device.array((tokens, 4 * width), bfloat16)
            if "gelu" in options.shapes:
                compiled(product, epilogue="bias_gelu", bias=bias, preactivation=kept)
            if "flag" in options.shapes:
                compiled(product, nonfinite=device.array((1,), np.int32))
        print(f"{len(device.builds)} kernels compiled")


def as_array(tensor: Any) -> Any:
    """The same memory as our array: bfloat16 as its bits."""
    dtype = np.float32 if tensor.element_size() == 4 else np.uint16
    return current_device().view(tensor.data_ptr(), tuple(tensor.shape), dtype, owner=tensor)


def most_workspace(m: int, n: int, k: int, layout: str, variants: Sequence[str | None]) -> int:
    """Elements of workspace with which each variant is at its best."""
    return max(workspace_size(m, n, k, layout=layout, variant=variant) for variant in variants)


def mma_variant() -> str | None:
    """The fastest variant for tensor cores of sm_80."""
    names = [variant.name for variant in VARIANTS if variant.made_for == "sm_80" and variant.runs_here()]
    return names[-1] if names else None


def measured(torch: Any, product: Product, options: Any) -> list[Any]:
    """The row of a product."""
    _, what, m, n, k, layout, has_weight_in_out = product
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    a, b = normal(*((k, m) if layout[0] == "T" else (m, k))), normal(*((n, k) if layout[1] == "T" else (k, n)))
    left, right = (a.T if layout[0] == "T" else a), (b.T if layout[1] == "T" else b)
    out_dtype = torch.float32 if what == "dw float32" else torch.bfloat16
    c, peer = (torch.full((m, n), math.nan, device="cuda", dtype=out_dtype) for _ in range(2))
    product_of = partial(torch.mm, out_dtype=out_dtype) if out_dtype == torch.float32 else torch.mm
    mma = mma_variant() if options.mma else None
    workspace = torch.empty(most_workspace(m, n, k, layout, [options.variant, mma]), device="cuda")
    ours = partial(gemm, as_array(a), as_array(b), as_array(c), layout=layout, workspace=as_array(workspace))

    calls: dict[str, Callable[[], Any]] = {
        "ours": partial(ours, variant=options.variant),
        "cuBLAS": lambda: product_of(left, right, out=peer),
    }
    if has_weight_in_out:
        calls["natural"] = natural_call(product_of, what, left, right, layout, peer)
    if mma is not None:
        calls["mma.sync"] = partial(ours, variant=mma)

    errors = {}
    for name in ("ours", "cuBLAS"):
        calls[name]()
        errors[name] = relative_error(torch, left, right, c if name == "ours" else peer)
    s = harness.interleaved_s(calls, options.runs)
    rate = {name: product.tflop / seconds for name, seconds in s.items()}
    best = max(rate["cuBLAS"], rate.get("natural", 0))
    return [
        *(product.shape, what, m, n, k, layout, rate["ours"], rate["cuBLAS"], rate["ours"] / rate["cuBLAS"]),
        *((rate["natural"], rate["ours"] / rate["natural"]) if "natural" in rate else ("", "")),
        rate["ours"] / best,
        *((rate["mma.sync"], rate["mma.sync"] / best) if "mma.sync" in rate else ("", "")),
        *(errors["ours"], errors["cuBLAS"]),
    ]


def natural_call(
    product_of: Callable[..., Any], what: str, left: Any, right: Any, layout: str, peer: Any
) -> Callable[[], Any]:
    """The same product with the weight stored [out, in], as PyTorch's nn.Linear has it."""
    if what in ("forward", "dx"):
        # forward: x w^T of w [out, in]; dx: dy w. In both the other order of the right operand in memory.
        other = right.T.contiguous().T if layout == "NN" else right.contiguous()
        return lambda: product_of(left, other, out=peer)
    turned = peer.view(peer.shape[1], peer.shape[0])
    return lambda: product_of(right.T, left.T, out=turned)  # dy^T x, [out, in]


def relative_error(torch: Any, left: Any, right: Any, c: Any) -> float:
    """||c - left right|| / ||left right|| in float64, over some rows and columns; NaN anywhere in c is an error."""
    if not bool(torch.isfinite(c).all()):
        return math.nan
    rows = torch.randint(left.shape[0], (SAMPLED_ROWS,), device="cuda")
    columns = torch.randint(right.shape[1], (SAMPLED_COLUMNS,), device="cuda")
    exact = left[rows].double() @ right[:, columns].double()
    return float((c[rows][:, columns].double() - exact).norm() / exact.norm())


def measured_gelu(torch: Any, model: str, options: Any) -> list[Any]:
    """The row of a model's first MLP layer with bias and GeLU; both sides keep what the backward pass needs."""
    width, tokens, _ = MODELS[model]
    product = Product(f"{model} fc", "bias + GeLU", tokens, 4 * width, width, "NN", True)
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, w, bias = normal(tokens, width), normal(width, 4 * width), normal(4 * width)
    w = w / math.sqrt(width)
    y, kept, peer_kept = (torch.full((tokens, 4 * width), math.nan, device="cuda", dtype=x.dtype) for _ in range(3))
    bias_gelu = torch.compile(lambda h, b: torch.nn.functional.gelu(h + b, approximate="tanh"), dynamic=False)
    natural = w.T.contiguous()
    ours = partial(
        gemm,
        *(as_array(x), as_array(w), as_array(y)),
        epilogue="bias_gelu",
        bias=as_array(bias),
        preactivation=as_array(kept),
    )
    calls: dict[str, Callable[[], Any]] = {
        "ours": partial(ours, variant=options.variant),
        "cuBLAS": lambda: bias_gelu(torch.mm(x, w, out=peer_kept), bias),
        "natural": lambda: bias_gelu(torch.mm(x, natural.T, out=peer_kept), bias),
    }
    mma = mma_variant() if options.mma else None
    if mma is not None:
        calls["mma.sync"] = partial(ours, variant=mma)
    calls["ours"]()
    rows = torch.randint(tokens, (SAMPLED_ROWS,), device="cuda")
    exact = torch.nn.functional.gelu(x[rows].double() @ w.double() + bias.double(), approximate="tanh")
    found = [y, calls["cuBLAS"]()]
    errors = [float((f[rows].double() - exact).norm() / exact.norm()) for f in found]
    s = harness.interleaved_s(calls, options.runs)
    rate = {name: product.tflop / seconds for name, seconds in s.items()}
    best = max(rate["cuBLAS"], rate["natural"])
    return [
        *(product.shape, product.what, product.m, product.n, product.k, "NN", rate["ours"]),
        *(rate["cuBLAS"], rate["ours"] / rate["cuBLAS"], rate["natural"], rate["ours"] / rate["natural"]),
        rate["ours"] / best,
        *((rate["mma.sync"], rate["mma.sync"] / best) if "mma.sync" in rate else ("", "")),
        *errors,
    ]


def measured_flag(torch: Any, model: str, options: Any) -> list[Any]:
    """The row of a model's first MLP layer with the flag for what is not finite, beside the same without it."""
    width, tokens, _ = MODELS[model]
    product = Product(f"{model} fc", "flag", tokens, 4 * width, width, "NN", True)
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, w = normal(tokens, width), normal(width, 4 * width)
    y = torch.full((tokens, 4 * width), math.nan, device="cuda", dtype=x.dtype)
    flag = current_device().view((bits := torch.zeros(1, device="cuda", dtype=torch.int32)).data_ptr(), (1,), np.int32)
    without = partial(gemm, as_array(x), as_array(w), as_array(y), variant=options.variant)
    calls = {"with": partial(without, nonfinite=flag), "without": without}
    s = harness.interleaved_s(calls, FLAG_RUNS)
    if int(bits):
        raise SystemExit(f"gemm: the flag says that a finite product of {product.shape} is not")
    rates = [product.tflop / s[name] for name in ("with", "without")]
    values = (product.shape, product.what, product.m, product.n, product.k, "NN", *rates, rates[0] / rates[1])
    return [*values, *[""] * (len(COLUMNS) - len(values))]


def summary(rows: list[list[Any]]) -> list[list[Any]]:
    """Geometric mean and worst of each ratio, of each kind of row."""
    kinds = {
        "all but float32": lambda row: row[1] in ("forward", "dx", "dw"),
        "dw float32": lambda row: row[1] == "dw float32",
        "bias + GeLU": lambda row: row[1] == "bias + GeLU",
        "flag": lambda row: row[1] == "flag",
    }
    found = []
    for kind, belongs in kinds.items():
        mine = [row for row in rows if belongs(row)]
        if not mine:
            continue
        for name, combine in (("geometric mean", _geometric_mean), ("worst", min)):
            line: list[Any] = [name, kind, *[""] * (len(COLUMNS) - 2)]
            for i, column in enumerate(COLUMNS):
                values = [row[i] for row in mine if row[i] != ""]
                if "ratio" in column and values:
                    line[i] = combine(values)
            found.append(line)
        over = [row[-2] / row[-1] for row in mine if row[-1] != ""]
        if over:
            found.append(["largest error over cuBLAS's", kind, *[""] * (len(COLUMNS) - 4), max(over), ""])
    return found


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=GROUPS, default=list(GROUPS), help="GPU only (default: all)")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="GPU only (default: all)")
    parser.add_argument("--variant", help="GPU only (default: what gemm chooses)")
    parser.add_argument("--no-mma", dest="mma", action="store_false", help="GPU only: leave the mma.sync variant out")
    parser.add_argument("--runs", type=int, default=20, help="GPU only: runs of each call (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="GPU only: start no row after this time")
    parser.add_argument("--compile", action="store_true", help="fill the cache for sm_90a, and measure nothing")


def main() -> None:
    options = harness.parse_options(__doc__, add_options)
    if options.compile:
        compile_ahead(options)
    elif current_device().kind == "cpu":
        on_cpu(options)
    else:
        on_gpu(options)


if __name__ == "__main__":
    main()
