import math

import pytest

from numstack.errors import ConfigError
from numstack.optim import schedules

PARTS = {"peak": 2.0, "n_steps": 11, "n_warmup": 4, "final": 0.5}


def curve(name, **parts):
    schedule = schedules.create(name, **parts)
    return [schedule(step) for step in range(parts["n_steps"])]


@pytest.mark.parametrize("name", schedules.NAMES)
def test_all_warm_up_in_equal_steps_to_the_peak(name):
    assert curve(name, n_decay=3 if name == "warmup_stable_decay" else 0, **PARTS)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_constant():
    assert curve("constant", peak=2.0, n_steps=3) == [2.0, 2.0, 2.0]


def test_linear_falls_in_equal_steps_and_ends_at_final():
    assert curve("linear", **PARTS)[4:] == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5])


def test_cosine_is_half_way_in_the_middle_and_ends_at_final():
    values = curve("cosine", **PARTS)
    assert values[7] == pytest.approx(1.25)
    assert values[5] == pytest.approx(0.5 + 1.5 * 0.5 * (1 + math.cos(math.pi / 6)))
    assert values[10] == 0.5


def test_warmup_stable_decay_falls_in_its_last_steps():
    assert curve("warmup_stable_decay", n_decay=3, **PARTS)[4:] == pytest.approx([2, 2, 2, 2, 1.5, 1.0, 0.5])


def test_stays_at_final_afterwards():
    for name in ("linear", "cosine"):
        assert schedules.create(name, **PARTS)(100) == 0.5


@pytest.mark.parametrize("name", schedules.NAMES)
def test_one_step_is_a_schedule(name):
    assert math.isfinite(schedules.create(name, peak=1.0, n_steps=1)(0))


def test_errors():
    with pytest.raises(ConfigError, match="no schedule 'step'; choose one of constant, linear, cosine"):
        schedules.create("step", peak=1.0, n_steps=10)
    with pytest.raises(ConfigError, match="8 steps of warm-up and 3 of decay do not fit into 10 steps"):
        schedules.create("warmup_stable_decay", peak=1.0, n_steps=10, n_warmup=8, n_decay=3)
    with pytest.raises(ConfigError, match="do not fit into 0 steps"):
        schedules.create("constant", peak=1.0, n_steps=0)
