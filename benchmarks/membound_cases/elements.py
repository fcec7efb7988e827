"""Element by element: GELU, additions, casts, copies, dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.membound_cases.case import Case, Sizes, case, ours, random, size
from numstack.kernels import dropout, elementwise, gelu


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
