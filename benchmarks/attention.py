"""Attention, forward and backward: on a GPU beside PyTorch's cuDNN and FlashAttention-2, on a CPU beside its own code.

usage: python -m benchmarks.attention [--json PATH] [--shapes 124M 1.5B long] [--variants NAME ...] [--full] [--runs N]
       NUMSTACK_THREADS=1 python -m benchmarks.attention [--json PATH]      for one core of a CPU

Rates count the least arithmetic: two products of T x T x D forward and five backward, half of each for causal.

On a GPU: the heads of GPT-2 124M (batch 64) and 1.5B (batch 16) at T = 1024, and 8192 tokens with wide heads; bfloat16,
normal random numbers, causal unless --full adds the others. q, k and v of numstack are views of one packed array, as in
training; PyTorch's are arrays of their own, which suits it better. All calls run in turns, so that clocks and heat are
the same. "ratio" is to the faster back end: above 1 numstack is faster. Errors are relative to float64, Frobenius norm,
over the first head: of the output, and the largest of dq, dk and dv; "peer error" is of the faster back end.

On a CPU: small shapes, in GFLOP/s, float32, every variant.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.device import current_device
from numstack.kernels import attention

# --- on a CPU --------------------------------------------------------------------------------------------------------

CPU_SHAPES = [(12, 4, 64, 32), (12, 4, 128, 32), (2, 12, 256, 64)]  # B, H, T, D


def on_cpu(options: Any) -> None:
    torch = harness.one_threaded_torch()
    rows: list[list[Any]] = []
    for B, H, T, D in CPU_SHAPES:
        rng = np.random.default_rng(0)
        host_qkv = rng.standard_normal((B, T, 3, H, D), dtype=np.float32)
        host_dout = rng.standard_normal((B, T, H, D), dtype=np.float32)
        q, k, v = heads(memory.from_host(host_qkv))
        dq, dk, dv = heads(memory.empty((B, T, 3, H, D), np.float32))
        out, dout = (
            a.transpose(0, 2, 1, 3) for a in (memory.empty((B, T, H, D), np.float32), memory.from_host(host_dout))
        )
        lse = memory.empty((B, H, T), np.float32)
        workspace = memory.empty((attention.workspace_size(q),), np.float32)
        product = B * H * T * T * D
        what = f"B{B} H{H} T{T} D{D}"
        for variant in (v.name for v in attention.FORWARD if v.made_for == "any"):
            forward = partial(attention.forward, q, k, v, out, lse, variant=variant)
            backward = partial(attention.backward, q, k, v, out, dout, lse, dq, dk, dv, workspace, variant=variant)
            rows.append([what, variant, gflop_per_s(forward, 2 * product), gflop_per_s(backward, 5 * product)])
        if torch is not None:
            rows.append([what, "torch", *torch_rates(torch, host_qkv, host_dout, product)])
    harness.report("attention", ("shape", "variant", "forward", "backward"), rows, options)


def heads(packed: Any) -> list[Any]:
    """q, k and v as [batch, head, time, width]."""
    return [packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3)]


def gflop_per_s(run: Any, flops: int) -> float:
    return 1e-9 * flops / harness.median_s(run)


def torch_rates(torch: Any, qkv: np.ndarray, dout: np.ndarray, product: int) -> tuple[float, float]:
    q, k, v = (torch.from_numpy(np.ascontiguousarray(a)).requires_grad_() for a in heads(qkv))
    gradient = torch.from_numpy(dout.transpose(0, 2, 1, 3))
    run = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
    out = run()
    backward = partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
    return gflop_per_s(run, 2 * product), gflop_per_s(backward, 5 * product)


# --- on a GPU --------------------------------------------------------------------------------------------------------

SHAPES = {"124M": (64, 12, 1024, 64), "1.5B": (16, 25, 1024, 64), "long": (4, 16, 8192, 128)}  # B, H, T, D
BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}

COLUMNS = ("shape", "causal", "pass", "variant", "TFLOP/s", "cuDNN", "flash", "ratio", "error", "peer error")


def on_gpu(options: Any) -> None:
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    rows: list[list[Any]] = []
    for name in options.shapes:
        for causal in (True, False) if options.full else (True,):
            rows += measured(Case(torch, name, *SHAPES[name], causal), options)
    harness.report("attention", COLUMNS, rows, options)


def chosen(ladder: Any, names: list[str] | None) -> list[str]:
    """Variants to measure: those asked for, else those made for GPUs; the others are a hundred times slower."""
    return [v.name for v in ladder if v.runs_here() and (v.name in names if names else v.made_for != "any")]


class Case(NamedTuple):
    """One shape."""

    torch: Any
    name: str
    B: int
    H: int
    T: int
    D: int
    causal: bool

    def tflop(self, products: int) -> float:
        return 2e-12 * products * self.B * self.H * self.T**2 * self.D / (2 if self.causal else 1)

    def normal(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device="cuda", dtype=self.torch.bfloat16)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """PyTorch's, by the back end that is enabled."""
        return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def exact(self, *qkv_dout: Any) -> tuple[Any, ...]:
        """Of the first head in float64: out, dq, dk, dv."""
        q, k, v, dout = (a[:1, :1].double() for a in qkv_dout)
        for a in (q, k, v):
            a.requires_grad_()
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.D)
        if self.causal:
            seen = self.torch.ones(scores.shape[-2:], dtype=self.torch.bool, device="cuda").tril()
            scores = scores.masked_fill(~seen, -math.inf)
        out = scores.softmax(-1) @ v
        return out.detach(), *self.torch.autograd.grad(out, (q, k, v), dout)


def as_array(tensor: Any, dtype: Any = np.uint16) -> Any:
    """The same memory as our array: bfloat16 as its bits."""
    size = tensor.element_size()
    strides = tuple(size * step for step in tensor.stride())
    return current_device().view(tensor.data_ptr(), tuple(tensor.shape), dtype, strides, owner=tensor)


def measured(case: Case, options: Any) -> list[list[Any]]:
    """Rows of one shape: each variant's forward, then each variant's backward."""
    torch, _, B, H, T, D, causal = case
    packed, dpacked = case.normal(B, T, 3, H, D), case.normal(B, T, 3, H, D)
    out, dout = (case.normal(B, T, H, D).transpose(1, 2) for _ in range(2))
    lse = as_array(torch.empty(B, H, T, device="cuda"), np.float32)
    qkv, dqkv = ([a[:, :, i].transpose(1, 2) for i in range(3)] for a in (packed, dpacked))
    exact = case.exact(*qkv, dout)

    q, k, v, ours_out, ours_dout, dq, dk, dv = map(as_array, (*qkv, out, dout, *dqkv))
    workspace = as_array(torch.empty(attention.workspace_size(q), device="cuda"), np.float32)

    def forward(variant: str | None = None) -> None:
        attention.forward(q, k, v, ours_out, lse, causal=causal, variant=variant)

    def backward(variant: str | None = None) -> None:
        given = (q, k, v, ours_out, ours_dout, lse)
        attention.backward(*given, dq, dk, dv, workspace, causal=causal, variant=variant)

    peers = {name: Peer(case, backend, qkv, dout) for name, backend in BACKENDS.items()}

    def rows_of(
        what: str, products: int, ladder: Any, ours: Callable[..., None], results: list[Any]
    ) -> list[list[Any]]:
        variants = chosen(ladder, options.variants)
        if not variants:
            return []
        calls: dict[str, Callable[[], Any]] = {name: getattr(peer, what) for name, peer in peers.items()}
        errors = {name: relative_error(peer.results(what), exact) for name, peer in peers.items()}
        for variant in variants:
            calls[variant] = partial(ours, variant=variant)
            for result in results:
                result.fill_(math.nan)
            calls[variant]()
            errors[variant] = relative_error(results, exact)
        s = harness.interleaved_s(calls, options.runs)
        best = min(peers, key=s.__getitem__)
        rate = {name: case.tflop(products) / seconds for name, seconds in s.items()}
        return [
            [
                *(f"{case.name} B{B} H{H} T{T} D{D}", causal, what, variant, rate[variant]),
                *(rate[name] for name in BACKENDS),
                *(rate[variant] / rate[best], errors[variant], errors[best]),
            ]
            for variant in variants
        ]

    rows = rows_of("forward", 2, attention.FORWARD, forward, [out])
    forward()
    return rows + rows_of("backward", 5, attention.BACKWARD, backward, dqkv)


class Peer:
    """PyTorch's attention by one back end, on arrays of its own."""

    def __init__(self, case: Case, backend: str, qkv: list[Any], dout: Any) -> None:
        module = importlib.import_module("torch.nn.attention")
        self._case = case
        self._enabled = partial(module.sdpa_kernel, getattr(module.SDPBackend, backend))
        self._qkv = [a.contiguous().requires_grad_() for a in qkv]
        self._detached = [a.detach() for a in self._qkv]
        self._dout = dout.contiguous()
        with self._enabled():
            self._out = case.attend(*self._qkv)

    def forward(self) -> Any:
        with self._enabled():
            return self._case.attend(*self._detached)

    def backward(self) -> Any:
        return self._case.torch.autograd.grad(self._out, self._qkv, self._dout, retain_graph=True)

    def results(self, what: str) -> list[Any]:
        """What a call computes."""
        return [self.forward()] if what == "forward" else list(self.backward())


def relative_error(found: list[Any], exact: tuple[Any, ...]) -> float:
    """The largest of out, or of dq, dk and dv, over the first head; NaN anywhere in them is an error."""
    if any(not bool(a.isfinite().all()) for a in found):
        return math.nan
    wanted = exact[:1] if len(found) == 1 else exact[1:]
    return max(float((a[:1, :1].double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="GPU only (default: all)")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="GPU only (default: those made for GPUs)")
    parser.add_argument("--full", action="store_true", help="GPU only: without the causal mask as well")
    parser.add_argument("--runs", type=int, default=20, help="GPU only: runs of each call (default: %(default)s)")


def main() -> None:
    options = harness.parse_options(__doc__, add_options)
    (on_cpu if current_device().kind == "cpu" else on_gpu)(options)


if __name__ == "__main__":
    main()
