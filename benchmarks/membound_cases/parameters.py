"""What is done with all parameters and gradients: AdamW, the global norm, what is not finite, gradients of biases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.membound_cases.case import FLOAT32_ERROR, Case, PeerFunction, Sizes, case, ours, random, size
from numstack.kernels import adamw, reduce


def of_adamw(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    n = s.parameters
    param, grad, m = (random(torch, place, n, dtype=torch.float32) for _ in range(3))
    v = torch.rand(n, device=place)
    decay, scale = torch.full((-(-n // adamw.SEGMENT),), 0.1, device=place), torch.ones(1, device=place)
    lr, beta1, beta2, eps, step = 1e-4, 0.9, 0.95, 1e-8, 10
    options: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "step": step}

    def formula(param: Any, grad: Any, m: Any, v: Any) -> Any:
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (v / (1 - beta2**step)).sqrt_().add_(eps)
        param.mul_(1 - lr * 0.1).addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
        return param, m, v

    steps = torch.full((), float(step), device=place)

    def fused(param: Any, grad: Any, m: Any, v: Any) -> Any:
        torch._fused_adamw_(
            [param], [grad], [m], [v], [], [steps], lr=lr, beta1=beta1, beta2=beta2, weight_decay=0.1, eps=eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    state = [param, grad, m, v]
    peers: list[PeerFunction] = [("fused", fused, state)]
    if place == "cuda":
        peers.append(("compiled formula", torch.compile(formula, dynamic=False), state))
    arrays = [*map(ours, state), ours(decay)]
    run = partial(adamw.step, *arrays, grad_scale_1=ours(scale), **options)
    copies = [t.clone() for t in state]
    outputs = [param, m, v]
    nbytes = size(*state, *outputs)
    yield Case("adamw", str(n), nbytes, run, outputs, partial(formula, *copies), peers, FLOAT32_ERROR, compiles=False)
    low = torch.empty(n, dtype=torch.bfloat16, device=place)
    run = partial(adamw.step, ours(low), *arrays[1:], grad_scale_1=ours(scale), master=arrays[0], **options)
    copies = [t.clone() for t in state]

    def rounded(param: Any, grad: Any, m: Any, v: Any) -> Any:
        return (formula(param, grad, m, v)[0].to(torch.bfloat16),)

    def fused_and_cast(param: Any, grad: Any, m: Any, v: Any, low: Any) -> Any:
        fused(param, grad, m, v)
        low.copy_(param)

    def formula_and_cast(param: Any, grad: Any, m: Any, v: Any, low: Any) -> Any:
        low.copy_(formula(param, grad, m, v)[0])

    peers = [("fused", fused_and_cast, [*state, low])]
    if place == "cuda":
        peers.append(("compiled formula", torch.compile(formula_and_cast, dynamic=False), [*state, low]))
    expected = partial(rounded, *copies)
    nbytes += size(low)
    yield Case("adamw, bfloat16 copy", str(n), nbytes, run, [low], expected, peers, poisoned=[low], compiles=False)


def of_reduce(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    x = random(torch, place, s.parameters, dtype=torch.float32)
    out, count = torch.empty(1, device=place), torch.empty(1, dtype=torch.int32, device=place)
    workspace = torch.empty(reduce.workspace_size(s.parameters), device=place)
    run = partial(reduce.norm, ours(x), ours(out), ours(workspace))
    yield case("global norm", size(x), run, [out], torch.linalg.vector_norm, x, tolerance=1e-5)
    x[3], x[-1] = math.inf, math.nan
    run = partial(reduce.count_nonfinite, ours(x), ours(count), ours(workspace))

    def nonfinite(x: Any) -> Any:
        return (~torch.isfinite(x)).sum()

    expected = partial(nonfinite, x)
    yield Case("count of non-finite", str(s.parameters), size(x), run, [count], expected, [("eager", nonfinite, [x])])
    del x
    dy = random(torch, place, s.R, 4 * s.C)
    sums = torch.empty(4 * s.C, device=place)
    workspace = torch.empty(reduce.sum_rows_workspace_size(s.R, 4 * s.C), device=place)
    run = partial(reduce.sum_rows, ours(dy), ours(sums), ours(workspace))

    def bias_gradient(dy: Any) -> Any:
        return dy.sum(0, dtype=torch.float32)

    yield case("bias gradient", size(dy), run, [sums], bias_gradient, dy, tolerance=1e-4)
    del dy
    dy = random(torch, place, s.R, s.C, dtype=torch.float32)
    sums, copy = torch.empty(s.C, device=place), random(torch, place, s.R, s.C)
    run = partial(reduce.sum_rows, ours(dy), ours(sums), ours(workspace), copy_RC=ours(copy))

    def bias_gradient_and_cast(dy: Any) -> Any:
        return dy.sum(0), dy.to(copy.dtype)

    name = "bias gradient and cast to bfloat16"
    yield case(name, size(dy, copy), run, [sums, copy], bias_gradient_and_cast, dy, tolerance=1e-4)
