"""What models are made of: parameters, and modules that hold parameters and other modules.

A module declares its parameters and submodules as attributes, and computes in ``__call__``. Names follow from the
attributes: the weight of ``self.h[0].attn.c_attn`` is ``h.0.attn.c_attn.weight``. No memory is taken until
:class:`numstack.nn.ParameterStore` lays the parameters of a whole model out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from numstack.device import Array
from numstack.dtypes import float32, storage
from numstack.errors import DTypeError, NumstackError
from numstack.nn.init import Initializer
from numstack.tensor import Tensor


class Parameter(Tensor):
    """A tensor that training changes; a leaf of every graph.

    Parameters
    ----------
    shape : tuple of int
    initializer : callable
        Draws its first values (``numstack.nn.init``).
    n_rows : int, optional
        Rows to have in memory, where that is more than ``shape`` says: the last ones are padding, which is zero, stays
        zero, and is not saved.

    Attributes
    ----------
    shape : tuple of int
        In memory, padding included: what operations see.
    saved_shape : tuple of int
        Without padding: what a checkpoint holds.
    rounded : array or None
        Its values in 16 bits, where the store keeps such copies.
    name : str
        Its path in the model; set, like ``range`` and the memory itself, by the ParameterStore.
    range : tuple of int
        Where it lies in the flat buffers, in elements: first, and one past the last with its padding.
    decays : bool
        Whether weight decay applies: to matrices, not to biases and gains.
    """

    __slots__ = ("_shape", "initializer", "name", "range", "rounded", "saved_shape")

    def __init__(self, shape: tuple[int, ...], initializer: Initializer, *, n_rows: int | None = None) -> None:
        super().__init__(None, requires_grad=True)  # type: ignore[arg-type]
        self._shape = shape if n_rows is None else (n_rows, *shape[1:])
        self.saved_shape = shape
        self.initializer = initializer
        self.rounded: Array | None = None
        self.name = ""
        self.range = (0, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def decays(self) -> bool:
        return len(self._shape) > 1

    def stored_as(self, dtype: np.dtype[Any]) -> Tensor:
        """The parameter as an operation reads it: itself in float32, or its 16-bit copy, whose gradient is its own.

        Raises
        ------
        DTypeError
            If there is no copy in this format.
        """
        if dtype == float32:
            return self
        if self.rounded is None or self.rounded.dtype != storage(dtype):
            raise DTypeError(
                f"{self.name or 'a parameter'} is to be read in {dtype}, but no such copy is kept; "
                "give its ParameterStore low= that format"
            )
        return Tensor(self.rounded, requires_grad=True, source=self)

    def __repr__(self) -> str:
        return f"<Parameter {self.name or 'without memory'} {self._shape}>"


class Module:
    """Base of everything that holds parameters.

    Attributes
    ----------
    training : bool
        Of the outermost module: whether dropout drops. Set by :meth:`train` and :meth:`eval`.
    """

    training = True

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NumstackError(f"{type(self).__name__} does not say what it computes: define __call__")

    def train(self) -> None:
        """Let dropout drop."""
        self.training = True

    def eval(self) -> None:
        """Let dropout pass everything, as for evaluation and sampling."""
        self.training = False

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Every parameter with its name, in the order of definition; a shared one once, under its first name."""
        yield from _walk(self, prefix, set())


def _walk(value: object, name: str, seen: set[int]) -> Iterator[tuple[str, Parameter]]:
    if isinstance(value, Parameter):
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value
        return
    if isinstance(value, Module):
        children = vars(value).items()
    elif isinstance(value, (list, tuple)):
        children = {str(index): child for index, child in enumerate(value)}.items()
    else:
        return
    for key, child in children:
        yield from _walk(child, f"{name}.{key}" if name else key, seen)
