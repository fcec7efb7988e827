"""The ladder of variants of an operation: the same result, computed in ways that differ in speed and difficulty.

A kernel file ends with its table, plainest first::

    VARIANTS = Variants("gemm", [
        Variant("thread_per_element", _thread_per_element, note="Each thread reads a whole row of a and column of b."),
        Variant("register_tile", _register_tile, supports=lambda m, n, k: k > 0, note="..."),
    ])

and its launcher asks ``VARIANTS.pick(variant, m, n, k).launch(...)``: the one asked for by name, or else the fastest
(the last in the table) that supports these sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from numstack.errors import ConfigError


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
    """

    name: str
    launch: Callable[..., None]
    note: str
    supports: Callable[..., bool] = _always


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

    def pick(self, name: str | None, *needs: object) -> Variant:
        """The variant called ``name``, or the fastest that supports ``needs`` if it is None.

        Raises
        ------
        ConfigError
            If there is no variant of this name, or it does not support ``needs``.
        """
        if name is None:
            return next(variant for variant in self._fastest_first if variant.supports(*needs))
        variant = self._by_name.get(name)
        if variant is None:
            raise ConfigError(
                f"{self.operation}: there is no variant {name!r}; choose one of {', '.join(self.names())}"
            )
        if not variant.supports(*needs):
            able = [v.name for v in self if v.supports(*needs)]
            raise ConfigError(
                f"{self.operation}: variant {name!r} does not support {needs}; choose one of {', '.join(able)}"
            )
        return variant
