"""All parameters of a model in one flat buffer, and their gradients in another of the same layout.

One fill clears the gradients, one launch updates every parameter, a bucket of gradients for an all-reduce is a slice.
Parameters lie in the order in which the forward pass uses them, so that the backward pass makes gradients final from
the end of the buffer to its start, and neighbours in time are neighbours in memory. Each starts on a segment of
``adamw.SEGMENT`` elements; the padding after it is zero and stays zero. Values and gradients are float32; a third
buffer holds the values in 16 bits if parts of the model read them so.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from numstack import memory
from numstack.device import Array, current_device
from numstack.dtypes import storage
from numstack.errors import CheckpointError, ConfigError
from numstack.kernels import elementwise
from numstack.kernels.adamw import SEGMENT
from numstack.nn.module import Module, Parameter
from numstack.tensor import Tensor


class ParameterStore:
    """Lays out the parameters of a model, draws their first values, and gives them their memory.

    Parameters
    ----------
    module : Module
        The whole model.
    seed : int
        Each parameter's values depend on this and on its name only, so that every rank starts with the same bits.
    low : dtype, optional
        A 16-bit format to keep copies of all values in, for the parts of the model that read them in that format.

    Attributes
    ----------
    values, gradients : array, shape (size,), float32
        The flat buffers.
    rounded : array, shape (size,), or None
        ``values`` in the format ``low``.
    size : int
        Elements of a flat buffer, padding included: a multiple of ``adamw.SEGMENT``.
    ranges : list of (int, int)
        First element and one past the last of each parameter and its padding, **in the order in which backward makes
        them final**: from the end of the buffer to its start.

    Raises
    ------
    ConfigError
        If the model has no parameters, or one of them belongs to another store.
    """

    def __init__(self, module: Module, *, seed: int, low: np.dtype[Any] | None = None) -> None:
        self._parameters: dict[str, Parameter] = {}
        start = 0
        for name, parameter in module.named_parameters():
            if parameter.name:
                raise ConfigError(f"ParameterStore: {name} already has memory, as {parameter.name} of another store")
            stop = start + -(-parameter.size // SEGMENT) * SEGMENT
            parameter.name, parameter.range = name, (start, stop)
            self._parameters[name] = parameter
            start = stop
        if start == 0:
            raise ConfigError(f"ParameterStore: {type(module).__name__} has no parameters")
        self.size = start
        self.ranges = [parameter.range for parameter in reversed(self._parameters.values())]

        host = np.zeros(self.size, np.float32)
        for parameter in self:
            generator = np.random.default_rng([seed, zlib.crc32(parameter.name.encode())])
            self.slice(host, parameter)[...] = parameter.initializer(generator, parameter.saved_shape)
        self.values: Array = memory.from_host(host, scope="persistent")
        self.gradients: Array = memory.empty((self.size,), np.float32, scope="backward")
        self.rounded: Array | None = None
        if low is not None:
            self.rounded = memory.empty((self.size,), storage(low), scope="persistent")
        for parameter in self:
            parameter.array = _whole(self.values, parameter)
            parameter.grad = Tensor(_whole(self.gradients, parameter))
            parameter.rounded = None if self.rounded is None else _whole(self.rounded, parameter)
        self._round()
        self.zero_gradients()

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters.values())

    def __len__(self) -> int:
        return len(self._parameters)

    def __getitem__(self, name: str) -> Parameter:
        return self._parameters[name]

    @property
    def n_parameters(self) -> int:
        """Numbers that training changes, padding not counted."""
        return sum(math.prod(parameter.saved_shape) for parameter in self)

    @staticmethod
    def slice(flat: Any, parameter: Parameter) -> Any:
        """The view of a flat buffer that belongs to ``parameter``, in its shape, without padding."""
        start = parameter.range[0]
        return flat[start : start + math.prod(parameter.saved_shape)].reshape(parameter.saved_shape)

    def zero_gradients(self) -> None:
        """Start a new sum of gradients."""
        current_device().fill(self.gradients, 0.0)
        for parameter in self:
            parameter.overwrite_grad = True

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all parameters on the host, by name."""
        return self.unpack(self.values)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Set all parameters.

        Raises
        ------
        CheckpointError
            If names or shapes are not those of the model; then nothing has changed.
        """
        self.pack(state, self.values, "state_dict")
        self._round()

    def unpack(self, flat: Array) -> dict[str, np.ndarray]:
        """Copies on the host of each parameter's part of a flat buffer, by name."""
        host = memory.to_host(flat)
        return {parameter.name: self.slice(host, parameter).copy() for parameter in self}

    def pack(self, state: Mapping[str, np.ndarray], flat: Array, what: str) -> None:
        """Fill a flat buffer from arrays by parameter name; the reverse of :meth:`unpack`.

        Raises
        ------
        CheckpointError
            If names or shapes do not fit; ``what`` names the culprit. Then nothing has changed.
        """
        missing, unknown = self._parameters.keys() - state.keys(), state.keys() - self._parameters.keys()
        if missing or unknown:
            raise CheckpointError(
                f"{what}: {_listed('missing', missing)}{_listed('unknown', unknown)}"
                "is it of a model with other options?"
            )
        host = np.zeros(self.size, np.float32)
        for parameter in self:
            values = np.asarray(state[parameter.name])
            if values.shape != parameter.saved_shape:
                raise CheckpointError(
                    f"{what}: {parameter.name} has shape {values.shape} but the model's has {parameter.saved_shape}; "
                    "is it of a model with other options?"
                )
            self.slice(host, parameter)[...] = values
        current_device().copy(flat, host)
        current_device().synchronize()

    def _round(self) -> None:
        """Make the 16-bit copies from the values. A step of the optimiser does so as it goes."""
        if self.rounded is not None:
            elementwise.cast(self.values, self.rounded)


def _whole(flat: Any, parameter: Parameter) -> Any:
    """The view of a flat buffer that belongs to ``parameter``, padded rows included."""
    start = parameter.range[0]
    return flat[start : start + parameter.size].reshape(parameter.shape)


def _listed(what: str, names: set[str]) -> str:
    """The first few names, for a message."""
    if not names:
        return ""
    shown = sorted(names)[:3]
    return f"{len(names)} {what} ({', '.join(shown)}{', ...' if len(names) > 3 else ''}); "
