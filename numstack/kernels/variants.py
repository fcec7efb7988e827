"""The ladder of variants of an operation: the same result, computed in ways that differ in speed and difficulty.

A kernel file ends with its table, plainest first::

    VARIANTS = Variants("gemm", [
        Variant("thread_per_element", _thread_per_element, note="Each thread reads a whole row of a and column of b."),
        Variant("register_tile", _register_tile, supports=lambda m, n, k: k > 0, note="..."),
    ])

and its launcher asks ``VARIANTS.pick(variant, m, n, k).launch(...)``: the one asked for by name, or else the fastest
(the last in the table) that is made for this device and supports these sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numstack.device import current_device
from numstack.errors import ConfigError

MadeFor = Literal["any", "gpu", "sm_80", "sm_90a"]


def _always(*needs: object) -> bool:
    return True


@dataclass(frozen=True)
class Variant:
    """One way to compute an operation.

    Attributes
    ----------
    name : str
        Says what it does (``shared_tile``), never a number.
    launch : callable
        Launches the kernel; takes what the operation's launcher passes on.
    note : str
        One sentence: what it fixes in the variant before it.
    supports : callable
        Whether it gives the right result for what :meth:`Variants.pick` is told (each operation says what).
    made_for : {"any", "gpu", "sm_80", "sm_90a"}
        The devices on which it is a default: any, GPUs, GPUs of at least compute capability 8.0, or those of 9.0 alone
        (wgmma is there and nowhere else). By name it also runs on a CPU, except for ``sm_90a``.
    by_default : bool
        False: chosen by name alone, since nobody has seen yet that it is right on such a device.
    """

    name: str
    launch: Callable[..., None]
    note: str
    supports: Callable[..., bool] = _always
    made_for: MadeFor = "any"
    by_default: bool = True

    def runs_here(self) -> bool:
        """Whether the current device can run it."""
        device = current_device()
        if device.kind == "cpu":
            return self.made_for != "sm_90a"
        capability = device.properties.compute_capability
        return {"sm_80": capability >= (8, 0), "sm_90a": capability == (9, 0)}.get(self.made_for, True)

    def is_default_here(self) -> bool:
        """Whether it is made for the current device."""
        is_made_for_it = self.made_for == "any" or (current_device().kind != "cpu" and self.runs_here())
        return self.by_default and is_made_for_it


class Variants:
    """The variants of one operation, from the plainest to the fastest.

    Parameters
    ----------
    operation : str
        Used in messages.
    ladder : sequence of Variant
        Plainest first. The first must support everything.
    """

    def __init__(self, operation: str, ladder: Sequence[Variant]) -> None:
        self.operation = operation
        self._by_name = {variant.name: variant for variant in ladder}
        self._fastest_first = tuple(reversed(ladder))

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._by_name.values())

    def names(self) -> list[str]:
        """Names, plainest first."""
        return list(self._by_name)

    def runnable(self) -> list[str]:
        """Names of those that run on the current device, plainest first."""
        return [variant.name for variant in self if variant.runs_here()]

    def defaults(self, *needs: object) -> list[str]:
        """Names of those made for this device that support ``needs``, plainest first: what benchmarks compare."""
        return [variant.name for variant in self if variant.is_default_here() and variant.supports(*needs)]

    def pick(self, name: str | None, *needs: object) -> Variant:
        """The variant called ``name``, or if it is None the fastest made for this device that supports ``needs``.

        Raises
        ------
        ConfigError
            If there is no variant of this name, it does not run on this device, or it does not support ``needs``.
        """
        if name is None:
            return next(v for v in self._fastest_first if v.is_default_here() and v.supports(*needs))
        variant = self._by_name.get(name)
        if variant is None:
            raise ConfigError(
                f"{self.operation}: there is no variant {name!r}; choose one of {', '.join(self.names())}"
            )
        if not variant.runs_here():
            raise ConfigError(
                f"{self.operation}: variant {name!r} needs a GPU ({variant.made_for}), and this device is "
                f"{current_device().name}; choose one of {', '.join(self.runnable())}"
            )
        if not variant.supports(*needs):
            able = [v.name for v in self if v.runs_here() and v.supports(*needs)]
            asked = ", ".join(map(_described, needs))
            raise ConfigError(
                f"{self.operation}: variant {name!r} does not support {asked}; choose one of {', '.join(able)}"
            )
        return variant


def _described(need: Any) -> str:
    """For a message: of an array its dtype, shape and address, or else what it says of itself."""
    if not hasattr(need, "strides"):
        return str(need)
    return f"{need.dtype} of shape {need.shape} at {current_device().address(need):#x}"
