"""Rows that are normalised: LayerNorm, also of a float32 stream and of a sum, RMSNorm, softmax."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.membound_cases.case import Case, PeerFunction, Sizes, case, ours, random, size
from numstack.kernels import layernorm, layernorm_residual, rmsnorm, softmax


def of_layernorm(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    x, dy = (random(torch, place, s.R, s.C) for _ in range(2))
    y, dx = torch.empty_like(x), torch.empty_like(x)
    weight, bias = (random(torch, place, s.C) for _ in range(2))
    mean, rstd, dweight, dbias = (torch.empty(n, device=place) for n in (s.R, s.R, s.C, s.C))
    workspace = torch.empty(layernorm.workspace_size(s.R, s.C), device=place)
    ox, oy, ody, odx = map(ours, (x, y, dy, dx))
    oweight, obias = ours(weight.float()), ours(bias.float())
    statistics = [ours(mean), ours(rstd)]
    run = partial(layernorm.forward, ox, oweight, obias, oy, eps=1e-5)

    def forward(x: Any, weight: Any, bias: Any) -> Any:
        return torch.nn.functional.layer_norm(x, (s.C,), weight, bias)

    def forward_kept(x: Any, weight: Any, bias: Any) -> Any:
        return torch.ops.aten.native_layer_norm(x, [s.C], weight, bias, 1e-5)

    yield case("layernorm forward", size(x, y), run, [y], forward, x, weight, bias)
    run, kept = partial(layernorm.forward, ox, oweight, obias, oy, *statistics, eps=1e-5), [y, mean, rstd]
    yield case("layernorm forward, statistics kept", size(x, *kept), run, kept, forward_kept, x, weight, bias)
    _, tmean, trstd = torch.native_layer_norm(x, [s.C], weight, bias, 1e-5)

    def backward(dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
        return torch.ops.aten.native_layer_norm_backward(dy, x, [s.C], mean, rstd, weight, bias, [True, True, True])

    arrays = (ody, ox, oweight, *statistics, odx, ours(dweight), ours(dbias), ours(workspace))
    run = partial(layernorm.backward, *arrays)
    inputs = (dy, x, tmean, trstd, weight, bias)
    yield case("layernorm backward", size(dy, x, dx), run, [dx, dweight, dbias], backward, *inputs, tolerance=1e-2)

    stream = random(torch, place, s.R, s.C)

    def into_stream(stream: Any, dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
        from_norm, dweight, dbias = backward(dy, x, mean, rstd, weight, bias)
        return stream + from_norm, dweight, dbias

    dx.copy_(stream)
    run = partial(run, accumulate_dx=True)
    peers = [("eager", into_stream, (stream, *inputs))]
    expected, shape = partial(into_stream, stream, *inputs), f"{s.R} x {s.C}"
    yield Case(
        "layernorm backward into dx", shape, size(dy, x, dx, dx), run, [dx, dweight, dbias], expected, peers, 1e-2
    )


def of_layernorm_of_float32_stream(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    """What training in bfloat16 does: a residual stream in float32, branches and what is kept for backward not."""
    stream = random(torch, place, s.R, s.C, dtype=torch.float32)
    dy, y, kept = (random(torch, place, s.R, s.C) for _ in range(3))
    weight, bias = (random(torch, place, s.C, dtype=torch.float32) for _ in range(2))
    mean, rstd, dweight, dbias = (torch.empty(n, device=place) for n in (s.R, s.R, s.C, s.C))
    workspace = torch.empty(layernorm.workspace_size(s.R, s.C), device=place)
    arrays = map(ours, (stream, weight, bias, y, mean, rstd))
    run = partial(layernorm.forward, *arrays, eps=1e-5, kept_RC=ours(kept))

    def forward(stream: Any, weight: Any, bias: Any) -> Any:
        y, mean, rstd = torch.ops.aten.native_layer_norm(stream, [s.C], weight, bias, 1e-5)
        return y.to(dy.dtype), mean, rstd, stream.to(dy.dtype)

    outputs = [y, mean, rstd, kept]
    name = "layernorm forward, float32 stream"
    yield case(name, size(stream, *outputs), run, outputs, forward, stream, weight, bias)
    x = stream.to(dy.dtype)
    _, tmean, trstd = torch.native_layer_norm(x.float(), [s.C], weight, bias, 1e-5)
    dstream = random(torch, place, s.R, s.C, dtype=torch.float32)
    dx = dstream.clone()
    mean.copy_(tmean.flatten())
    rstd.copy_(trstd.flatten())
    arrays = map(ours, (dy, x, weight, mean, rstd, dx, dweight, dbias, workspace))
    run = partial(layernorm.backward, *arrays, accumulate_dx=True)

    def backward(dstream: Any, dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
        from_norm, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy.float(), x.float(), [s.C], mean, rstd, weight, bias, [True, True, True]
        )
        return dstream + from_norm, dweight, dbias

    inputs = (dstream, dy, x, tmean, trstd, weight, bias)
    peers = [("eager", backward, inputs)]
    name, outputs = "layernorm backward into float32 stream", [dx, dweight, dbias]
    shape, expected = f"{s.R} x {s.C}", partial(backward, *inputs)
    yield Case(name, shape, size(dy, x, dx, dx), run, outputs, expected, peers, 1e-4)


def of_residual(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    x, residual = (random(torch, place, s.R, s.C) for _ in range(2))
    total, y = torch.empty_like(x), torch.empty_like(x)
    weight, bias = (random(torch, place, s.C) for _ in range(2))
    mean, rstd = (torch.empty(s.R, device=place) for _ in range(2))
    arrays = list(map(ours, (x, residual, weight.float(), bias.float(), total, y)))
    statistics = [ours(mean), ours(rstd)]
    run = partial(layernorm_residual.forward, *arrays, eps=1e-5)

    def forward(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        total = x + residual
        return total, torch.nn.functional.layer_norm(total, (s.C,), weight, bias)

    def forward_kept(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        total = x + residual
        return total, *torch.ops.aten.native_layer_norm(total, [s.C], weight, bias, 1e-5)

    inputs = (x, residual, weight, bias)
    yield case("residual and layernorm", size(x, residual, total, y), run, [total, y], forward, *inputs)
    run, kept = partial(layernorm_residual.forward, *arrays, *statistics, eps=1e-5), [total, y, mean, rstd]
    name = "residual and layernorm, statistics kept"
    yield case(name, size(x, residual, *kept), run, kept, forward_kept, *inputs)


def of_rmsnorm(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    x, dy = (random(torch, place, s.R, s.C) for _ in range(2))
    y, dx, weight = torch.empty_like(x), torch.empty_like(x), random(torch, place, s.C)
    rstd, dweight = torch.empty(s.R, device=place), torch.empty(s.C, device=place)
    workspace = torch.empty(rmsnorm.workspace_size(s.R, s.C), device=place)
    ox, oweight, orstd = ours(x), ours(weight.float()), ours(rstd)
    run = partial(rmsnorm.forward, ox, oweight, ours(y), eps=1e-5)

    def forward(x: Any, weight: Any) -> Any:
        return torch.nn.functional.rms_norm(x, (s.C,), weight, 1e-5)

    def forward_kept(x: Any, weight: Any) -> Any:
        rstd = torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-5)
        return (x.float() * rstd * weight.float()).to(x.dtype), rstd

    yield case("rmsnorm forward", size(x, y), run, [y], forward, x, weight)
    run, kept = partial(rmsnorm.forward, ox, oweight, ours(y), orstd, eps=1e-5), [y, rstd]
    yield case("rmsnorm forward, statistics kept", size(x, *kept), run, kept, forward_kept, x, weight)

    def by_autograd(dy: Any, x: Any, weight: Any) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        return torch.autograd.grad(forward(*leaves), leaves, dy)

    def formula(dy: Any, x: Any, weight: Any) -> Any:
        x, g = x.float(), dy.float() * weight.float()
        rstd = torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5)
        normal = x * rstd
        dx = rstd * (g - normal * (g * normal).mean(1, keepdim=True))
        return dx.to(dy.dtype), (dy.float() * normal).sum(0)

    peers: list[PeerFunction] = [("eager", by_autograd, [dy, x, weight])]
    if place == "cuda":
        peers.append(("compiled formula", torch.compile(formula, dynamic=False), [dy, x, weight]))
    gradients = [ours(dx), ours(dweight), ours(workspace)]
    run = partial(rmsnorm.backward, ours(dy), ox, oweight, orstd, *gradients)
    outputs, nbytes, shape = [dx, dweight], size(dy, x, dx), f"{s.R} x {s.C}"
    expected = partial(formula, dy, x, weight)
    yield Case("rmsnorm backward", shape, nbytes, run, outputs, expected, peers, poisoned=outputs, compiles=False)


def of_softmax(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    x, dy = (random(torch, place, s.R, s.T) for _ in range(2))
    y, dx = torch.empty_like(x), torch.empty_like(x)
    ox, oy, ody, odx = map(ours, (x, y, dy, dx))
    yield case("softmax forward", size(x, y), partial(softmax.forward, ox, oy), [y], partial(torch.softmax, dim=-1), x)
    y.copy_(torch.softmax(x, -1))

    def backward(dy: Any, y: Any) -> Any:
        return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)

    yield case("softmax backward", size(dy, y, dx), partial(softmax.backward, ody, oy, odx), [dx], backward, dy, y)
