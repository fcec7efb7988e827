"""numstack.kernels.loss_scale: the decision and the next scale, against the rule in Python."""

import math

import numpy as np
import pytest

from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels import loss_scale
from tests.support import assert_close, poisoned, to_device, to_host

RULE = {"growth": 4.0, "backoff": 0.25, "window": 3}
LIMITS = {"smallest": 2.0**-24, "largest": 2.0**60}


def update(norm: float, scale: float, counts: tuple[int, ...], max_norm: float = 1.0, **options):
    """``(norm', scale, grad_scale, counts)`` after the kernel."""
    norm_1, scale_1 = (to_device(np.array([x], np.float32)) for x in (norm, scale))
    counts_3, grad_scale_1 = to_device(np.array(counts, np.int32)), to_device(poisoned(1))
    loss_scale.update(norm_1, scale_1, counts_3, grad_scale_1, max_norm=max_norm, **{**RULE, **LIMITS, **options})
    return (*(float(to_host(x)[0]) for x in (norm_1, scale_1, grad_scale_1)), tuple(map(int, to_host(counts_3))))


CASES = {
    "within the limit": (4.0, 8.0, (0, 0, 0)),
    "clipped": (400.0, 8.0, (1, 7, 2)),
    "at the limit": (8.0, 8.0, (0, 0, 0)),
    "no gradient": (0.0, 8.0, (0, 0, 0)),
    "the scale grows": (4.0, 8.0, (2, 9, 0)),
    "overflow": (math.inf, 8.0, (2, 9, 0)),
    "overflow of the other sign of infinity": (math.nan, 8.0, (0, 0, 5)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_the_rule(case, max_norm):
    got = update(*case, max_norm=max_norm)
    expected = loss_scale.reference(*case, max_norm=max_norm, **RULE)
    assert_close(np.array(got[:3]), np.array(expected[:3]), rtol=1e-6, atol=0)
    assert got[3] == expected[3]


def test_the_scale_keeps_within_limits():
    assert update(1.0, 2.0**59, (2, 0, 0))[1] == 2.0**60
    assert update(math.inf, 2.0**-23, (2, 0, 0))[1] == 2.0**-24


def test_under_checks(under_checks):
    assert update(4.0, 8.0, (2, 9, 0)) == (0.5, 32.0, 0.125, (0, 10, 0))


def test_bad_arguments():
    one, counts = np.ones(1, np.float32), np.zeros(3, np.int32)
    options = {"max_norm": 1.0, **RULE, **LIMITS}
    with pytest.raises(ConfigError, match=r"loss_scale: .* growth=1.0, .*; expected 0 < smallest"):
        loss_scale.update(one, one, counts, one, **{**options, "growth": 1.0})
    with pytest.raises(ShapeError, match=r"loss_scale: counts_3 has shape \(2,\); expected \(3,\)"):
        loss_scale.update(one, one, counts[:2], one, **options)
    with pytest.raises(DTypeError, match="loss_scale: norm_1 has dtype float16; expected float32"):
        loss_scale.update(one.astype(np.float16), one, counts, one, **options)
