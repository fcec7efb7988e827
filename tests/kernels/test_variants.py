"""numstack.kernels.variants: which variant is chosen, by name and without."""

import pytest

from numstack.device import current_device, offline
from numstack.errors import ConfigError
from numstack.kernels.variants import Variant, Variants


def nothing(*args: object) -> None:
    """What the variants of this test launch."""


LADDER = Variants(
    "test",
    [
        Variant("plain", nothing, "Supports all."),
        Variant("even", nothing, "Faster.", supports=lambda n: n % 2 == 0),
        Variant("ampere", nothing, "Faster.", made_for="sm_80"),
        Variant("unseen", nothing, "Faster, perhaps.", made_for="sm_80", by_default=False),
        Variant("hopper", nothing, "Fastest.", supports=lambda n: n % 8 == 0, made_for="sm_90a"),
    ],
)


def chosen(n: int, name: str | None = None) -> str:
    return LADDER.pick(name, n).name


def test_the_fastest_that_is_made_for_the_device_and_supports_the_sizes() -> None:
    with offline.device("sm_80"):
        assert [chosen(n) for n in (1, 8)] == ["ampere", "ampere"]
    with offline.device("sm_90a"):
        assert [chosen(n) for n in (1, 8)] == ["ampere", "hopper"]


def test_by_name_also_what_is_never_a_default() -> None:
    with offline.device("sm_80"):
        assert chosen(1, "unseen") == "unseen"
        with pytest.raises(ConfigError, match="'hopper' needs a GPU"):
            chosen(8, "hopper")
        with pytest.raises(ConfigError, match="'even' does not support 1; choose one of plain, ampere, unseen"):
            chosen(1, "even")


@pytest.mark.skipif(current_device().kind != "cpu", reason="of a CPU: NUMSTACK_DEVICE=cpu runs this test")
def test_on_a_cpu() -> None:
    assert [chosen(n) for n in (1, 2)] == ["plain", "even"]
    assert LADDER.runnable() == ["plain", "even", "ampere", "unseen"]
