"""What models are made of: parameters, and modules that hold parameters and other modules.

A module declares its parameters and submodules as attributes, and computes in ``__call__``. Names follow from the
attributes: the weight of ``self.h[0].attn.c_attn`` is ``h.0.attn.c_attn.weight``. No memory is taken until
:class:`numstack.nn.ParameterStore` lays the parameters of a whole model out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numstack.errors import NumstackError
from numstack.nn.init import Initializer
from numstack.tensor import Tensor


class Parameter(Tensor):
    """A tensor that training changes; a leaf of every graph.

    Parameters
    ----------
    shape : tuple of int
    initializer : callable
        Draws its first values (``numstack.nn.init``).

    Attributes
    ----------
    name : str
        Its path in the model; set, like ``range`` and the memory itself, by the ParameterStore.
    range : tuple of int
        Where it lies in the flat buffers, in elements: first, and one past the last with its padding.
    decays : bool
        Whether weight decay applies: to matrices, not to biases and gains.
    """

    __slots__ = ("_shape", "initializer", "name", "range")

    def __init__(self, shape: tuple[int, ...], initializer: Initializer) -> None:
        super().__init__(None, requires_grad=True)  # type: ignore[arg-type]
        self._shape = shape
        self.initializer = initializer
        self.name = ""
        self.range = (0, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def decays(self) -> bool:
        return len(self._shape) > 1

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
