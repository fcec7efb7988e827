"""The operations that ``benchmarks.membound`` measures: ours, PyTorch's, and the bytes that they cannot avoid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numstack.device import current_device
from numstack.kernels import (
    adamw,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    gelu,
    layernorm,
    layernorm_residual,
    reduce,
    rmsnorm,
    softmax,
)


class Sizes(NamedTuple):
    """Rows and width of activations, rows and classes of logits, parameters, batch and time of tokens."""

    R: int
    C: int
    rows_of_logits: int
    V: int
    V_long: int
    parameters: int
    B: int
    T: int


FULL = Sizes(65536, 768, 16384, 50304, 131072, 124_475_904, 32, 1024)
SMALL = Sizes(48, 64, 6, 264, 520, 4096, 2, 16)

BFLOAT16_ERROR = 6e-3  # rounding alone is 1.7e-3
FLOAT32_ERROR = 2e-6

PeerFunction = tuple[str, Callable[..., Any], Sequence[Any]]


@dataclass
class Case:
    """An operation to measure.

    Attributes
    ----------
    name, shape : str
    nbytes : int
        The least that it can move.
    run : partial
        Ours: a launcher and its arguments.
    outputs : list of tensor
        Where ours leaves its results.
    expected : callable
        Returns what should be there, by PyTorch.
    peers : list of (name, function, inputs)
        PyTorch's ways.
    tolerance : float
    poisoned : list of tensor
        Outputs to fill with NaN first.
    compiles : bool
        Measure PyTorch's ways compiled as well.
    """

    name: str
    shape: str
    nbytes: int
    run: partial[Any]
    outputs: Sequence[Any]
    expected: Callable[[], Any]
    peers: Sequence[PeerFunction]
    tolerance: float = BFLOAT16_ERROR
    poisoned: Sequence[Any] = field(default_factory=list)
    compiles: bool = True


def case(
    name: str, nbytes: int, run: partial[Any], outputs: Sequence[Any], peer: Callable[..., Any], *inputs: Any,
    more_peers: Sequence[PeerFunction] = (), **options: Any,
) -> Case:  # fmt: skip
    """The usual: one function of PyTorch's is both the peer and what is expected."""
    shape = " x ".join(map(str, inputs[0].shape))
    peers = [("eager", peer, inputs), *more_peers]
    return Case(name, shape, nbytes, run, outputs, partial(peer, *inputs), peers, poisoned=outputs, **options)


def ours(tensor: Any) -> Any:
    """A tensor as an array of ours, the same memory; bfloat16 as its bits."""
    if current_device().kind == "cuda":
        from numstack.device.cuda.array import CudaArray

        return CudaArray.from_dlpack(tensor.detach())
    bits = {"torch.bfloat16": ("int16", np.uint16)}.get(str(tensor.dtype))
    if bits is None:
        return tensor.detach().numpy()
    import torch

    return tensor.detach().view(getattr(torch, bits[0])).numpy().view(bits[1])


def size(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def random(torch: Any, place: str, *shape: int, dtype: Any = None) -> Any:
    return torch.randn(*shape, device=place, dtype=dtype or torch.bfloat16)


# --- activations -----------------------------------------------------------------------------------------------------


def of_gelu(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    x, dy = (random(torch, place, s.R, 4 * s.C) for _ in range(2))
    y, dx = torch.empty_like(x), torch.empty_like(x)
    ox, ody, oy, odx = map(ours, (x, dy, y, dx))
    forward = partial(torch.nn.functional.gelu, approximate="tanh")
    backward = partial(torch.ops.aten.gelu_backward, approximate="tanh")

    def both(x: Any, dy: Any) -> Any:
        return torch.nn.functional.gelu(x, approximate="tanh"), torch.ops.aten.gelu_backward(dy, x, approximate="tanh")

    yield case("gelu forward", size(x, y), partial(gelu.forward, ox, oy), [y], forward, x)
    yield case("gelu backward", size(dy, x, dx), partial(gelu.backward, ody, ox, odx), [dx], backward, dy, x)
    run = partial(gelu.forward_backward, ox, ody, oy, odx)
    yield case("gelu forward and backward", size(x, dy, y, dx), run, [y, dx], both, x, dy)


def of_elementwise(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    x, z = (random(torch, place, s.R, 4 * s.C) for _ in range(2))
    y = torch.empty_like(x)
    ox, oz, oy = map(ours, (x, z, y))
    yield case("add", size(x, z, y), partial(elementwise.add, ox, oz, oy), [y], torch.add, x, z)
    yield case("scale", size(x, y), partial(elementwise.scale, ox, oy, 0.5), [y], lambda x: 0.5 * x, x)
    yield case("copy", size(x, y), partial(elementwise.copy, ox, oy), [y], torch.clone, x)
    yield case("fill", size(y), partial(elementwise.fill, oy, 2.0), [y], lambda y: torch.full_like(y, 2.0), y)
    turned = torch.empty(4 * s.C, s.R, dtype=x.dtype, device=place)
    transpose = partial(elementwise.transpose, ox, ours(turned))
    yield case("transpose", size(x, turned), transpose, [turned], lambda x: x.t().contiguous(), x)
    del z, oz
    wide = torch.empty(s.R, 4 * s.C, device=place)
    owide = ours(wide)
    yield case("cast to float32", size(x, wide), partial(elementwise.cast, ox, owide), [wide], lambda x: x.float(), x)
    to_bfloat16 = partial(elementwise.cast, owide, oy)
    yield case("cast to bfloat16", size(x, wide), to_bfloat16, [y], lambda wide: wide.to(torch.bfloat16), wide)


def of_dropout(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    x = random(torch, place, s.R, 4 * s.C)
    y = torch.empty_like(x)
    p = 0.1
    run = partial(dropout.forward, ours(x), ours(y), p=p, seed=1, offset=0)

    def expected() -> Any:
        """Masks differ, so: what is not dropped is scaled, and the right share is dropped."""
        dropped = (y == 0).float().mean()
        assert abs(float(dropped) - p) < 5 * math.sqrt(p * (1 - p) / y.numel()) + 1e-4 or place == "cpu"
        return torch.where(y == 0, 0, x / (1 - p))

    def drop(x: Any) -> Any:
        return torch.nn.functional.dropout(x, p)

    run()  # what is expected depends on the mask
    peers = [("eager", drop, [x])]
    yield Case("dropout forward", f"{s.R} x {4 * s.C}", size(x, y), run, [y], expected, peers, poisoned=[])
    _, mask = torch.native_dropout(x, p, True)
    peers = [("eager", partial(torch.ops.aten.native_dropout_backward, scale=1 / (1 - p)), [x, mask])]
    run = partial(dropout.backward, ours(x), ours(y), p=p, seed=1, offset=0)
    yield Case("dropout backward", f"{s.R} x {4 * s.C}", size(x, y), run, [y], expected, peers, poisoned=[])


# --- rows ------------------------------------------------------------------------------------------------------------


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


class Logits:
    """Logits, their targets, and what ours and PyTorch's make of them."""

    def __init__(self, torch: Any, rows: int, classes: int, place: str) -> None:
        self.logits = random(torch, place, rows, classes)
        self.targets = torch.randint(0, classes, (rows,), device=place)
        self.loss, self.lse = (torch.empty(rows, device=place) for _ in range(2))
        self.gradient = torch.empty_like(self.logits)
        scale = torch.ones(1, device=place)
        arrays = (self.logits, self.targets.to(torch.int32), self.loss, self.lse, self.gradient, scale)
        self.ours = list(map(ours, arrays))
        self.shape = f"{rows} x {classes}"
        self.nbytes = size(self.logits, self.gradient)
        self._torch = torch
        self._compiled_loss = torch.compile(self._loss)

    def _loss(self, logits: Any, targets: Any) -> Any:
        return self._torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")

    def both(self, logits: Any, targets: Any) -> Any:
        """Losses and gradient through autograd."""
        logits = logits.detach().requires_grad_()
        loss = self._torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        return loss.detach(), *self._torch.autograd.grad(loss.sum(), logits)

    def through_compiled_loss(self, logits: Any, targets: Any) -> Any:
        logits = logits.detach().requires_grad_()
        return self._torch.autograd.grad(self._compiled_loss(logits, targets), logits)

    def formula(self, logits: Any, targets: Any) -> Any:
        """Both without autograd."""
        p = self._torch.softmax(logits.float(), -1)
        hot = self._torch.arange(logits.shape[1], device=logits.device)[None] == targets[:, None]
        return -self._torch.log(p.gather(1, targets[:, None])), (p - hot.float()).to(logits.dtype)

    def case(self, name: str, run: partial[Any], poisoned: Sequence[Any]) -> Case:
        """Of loss and gradient at once."""
        inputs = [self.logits, self.targets]
        peers: list[PeerFunction] = [("eager", self.both, inputs)]
        if self.logits.is_cuda:
            peers.append(("compiled loss", self.through_compiled_loss, inputs))
            peers.append(("compiled formula", self._torch.compile(self.formula, dynamic=False), inputs))
        outputs, expected = [self.loss, self.gradient], partial(self.both, *inputs)
        return Case(
            name, self.shape, self.nbytes, run, outputs, expected, peers, poisoned=poisoned, compiles=False
        )  # fmt: skip


def of_cross_entropy(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    x = Logits(torch, s.rows_of_logits, s.V, place)
    logits, targets, loss, lse, gradient, scale = x.ours

    def forward(logits: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")

    run = partial(cross_entropy.forward, logits, targets, loss, lse)
    options: dict[str, Any] = {"tolerance": FLOAT32_ERROR}
    yield case("cross-entropy", size(x.logits), run, [x.loss], forward, x.logits, x.targets, **options)
    run = partial(cross_entropy.forward_backward, logits, targets, loss, gradient, scale)
    yield x.case("cross-entropy and gradient", run, [x.loss, x.gradient])
    cross_entropy.forward(logits, targets, loss, lse)
    run = partial(cross_entropy.backward, logits, targets, lse, gradient, scale)

    def backward(logits: Any, targets: Any, lse: Any) -> Any:
        hot = torch.arange(logits.shape[1], device=logits.device)[None] == targets[:, None]
        return (torch.exp(logits.float() - lse[:, None]) - hot.float()).to(logits.dtype)

    yield case("cross-entropy backward", x.nbytes, run, [x.gradient], backward, x.logits, x.targets, x.lse)
    x.gradient.copy_(x.logits)
    run = partial(cross_entropy.forward_backward, gradient, targets, loss, gradient, scale)
    yield x.case("cross-entropy and gradient in place", run, [])
    del x, logits, gradient, run
    x = Logits(torch, -(-s.rows_of_logits // 4), s.V_long, place)
    logits, targets, loss, _, gradient, scale = x.ours
    run = partial(cross_entropy.forward_backward, logits, targets, loss, gradient, scale)
    yield x.case("cross-entropy and gradient", run, [x.loss, x.gradient])


# --- parameters ------------------------------------------------------------------------------------------------------


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


def of_embedding(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    tokens = torch.randint(0, s.V, (s.B, s.T), device=place)
    table, positions = random(torch, place, s.V, s.C), random(torch, place, s.T, s.C)
    out = torch.empty(s.B, s.T, s.C, dtype=table.dtype, device=place)
    otokens = ours(tokens.to(torch.int32))
    n_rows = int(tokens.unique().numel())
    row = s.C * table.element_size()
    run = partial(embedding.forward, otokens, ours(table), ours(positions), ours(out))

    def forward(tokens: Any, table: Any, positions: Any) -> Any:
        return torch.nn.functional.embedding(tokens, table) + positions

    nbytes = size(out, positions) + 4 * tokens.numel() + n_rows * row
    yield case("embedding forward", nbytes, run, [out], forward, tokens, table, positions)
    narrow, wide = (random(torch, place, s.B, s.T, s.C, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    for which, dout in (
        ("tokens", narrow),
        ("tokens and positions", narrow),
        ("tokens, float32", wide),
        ("tokens and positions, float32", wide),
    ):
        dtable, dpositions = (torch.zeros(n, s.C, device=place) for n in (s.V, s.T))
        workspace = torch.empty(embedding.workspace_size(s.B, s.T, s.V), dtype=torch.int32, device=place)
        with_positions = "positions" in which
        odpositions = ours(dpositions) if with_positions else None
        run = partial(embedding.backward, otokens, ours(dout), ours(dtable), odpositions, ours(workspace))

        def exact(tokens: Any, dout: Any, with_positions: bool) -> Any:
            gradient = torch.zeros(s.V, s.C, device=place).index_add_(0, tokens.flatten(), dout.flatten(0, 1).float())
            return (gradient, dout.float().sum(0)) if with_positions else (gradient,)

        def dense(tokens: Any, dout: Any, with_positions: bool) -> Any:
            gradient = torch.ops.aten.embedding_dense_backward(dout, tokens, s.V, -1, False)
            return (gradient, dout.sum(0)) if with_positions else (gradient,)

        def adding(tokens: Any, dout: Any, dtable: Any, dpositions: Any, with_positions: bool) -> Any:
            """Atomic additions, in an order of their own."""
            dtable.index_add_(0, tokens.flatten(), dout.flatten(0, 1).float())
            if with_positions:
                dpositions += dout.float().sum(0)

        peers: list[PeerFunction] = [
            ("dense", dense, [tokens, dout, with_positions]),
            ("atomic", adding, [tokens, dout, dtable.clone(), dpositions.clone(), with_positions]),
        ]
        nbytes = size(dout) + 4 * tokens.numel() + n_rows * 2 * s.C * 4 + with_positions * 2 * size(dpositions)
        outputs = [dtable, dpositions] if with_positions else [dtable]
        expected = partial(exact, tokens, dout, with_positions)
        name, shape = f"embedding backward, {which}", f"{s.B} x {s.T} x {s.C}"
        yield Case(name, shape, nbytes, run, outputs, expected, peers, 1e-5)


FAMILIES: dict[str, Callable[[Any, Sizes, str], Iterator[Case]]] = {
    "gelu": of_gelu,
    "elementwise": of_elementwise,
    "dropout": of_dropout,
    "layernorm": of_layernorm,
    "layernorm of float32": of_layernorm_of_float32_stream,
    "residual": of_residual,
    "rmsnorm": of_rmsnorm,
    "softmax": of_softmax,
    "cross_entropy": of_cross_entropy,
    "adamw": of_adamw,
    "reduce": of_reduce,
    "embedding": of_embedding,
}

LADDERS = {
    gelu.forward: gelu.VARIANTS,
    gelu.backward: gelu.VARIANTS,
    gelu.forward_backward: gelu.VARIANTS,
    elementwise.add: elementwise.VARIANTS,
    elementwise.scale: elementwise.VARIANTS,
    elementwise.cast: elementwise.VARIANTS,
    elementwise.fill: elementwise.VARIANTS,
    elementwise.transpose: elementwise.TRANSPOSE_VARIANTS,
    dropout.forward: dropout.VARIANTS,
    layernorm.forward: layernorm.FORWARD,
    layernorm.backward: layernorm.BACKWARD,
    layernorm_residual.forward: layernorm_residual.FORWARD,
    rmsnorm.forward: rmsnorm.FORWARD,
    rmsnorm.backward: rmsnorm.BACKWARD,
    softmax.forward: softmax.FORWARD,
    softmax.backward: softmax.BACKWARD,
    cross_entropy.forward: cross_entropy.FORWARD,
    cross_entropy.backward: cross_entropy.BACKWARD,
    cross_entropy.forward_backward: cross_entropy.FORWARD_BACKWARD,
    adamw.step: adamw.VARIANTS,
    reduce.norm: reduce.VARIANTS,
    reduce.count_nonfinite: reduce.VARIANTS,
    reduce.sum_rows: reduce.SUM_ROWS_VARIANTS,
    embedding.forward: embedding.FORWARD,
    embedding.backward: embedding.BACKWARD,
}
"""The variants of each operation."""
