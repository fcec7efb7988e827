"""What a case is: an operation of ours, PyTorch's ways to do it, and the bytes that they cannot avoid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numstack.device import current_device


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
