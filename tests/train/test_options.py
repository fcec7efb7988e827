"""Options: defaults, ranges, and that the command line gives exactly what the user gave."""

import argparse
import dataclasses
from typing import Any

import pytest

from numstack.device import current_device, offline
from numstack.errors import ConfigError
from numstack.train.arguments import for_device
from numstack.train.options import FREE_TO_CHANGE, Options, add_arguments


def parse(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return vars(parser.parse_args(arguments))


def test_only_what_is_given_is_in_the_namespace() -> None:
    assert parse() == {}
    assert parse("--learning-rate", "0.01", "--steps", "5") == {"learning_rate": 0.01, "steps": 5}
    assert Options(**parse("--schedule", "linear")).schedule == "linear"


def test_help_names_every_option_with_its_default() -> None:
    parser = argparse.ArgumentParser(prog="train", formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for item in dataclasses.fields(Options):
        assert "--" + item.name.replace("_", "-") in text
        assert f"(default: {item.default})" in text or item.name == "data"


def test_unknown_option_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--learnin-rat", "1")
    assert caught.value.code == 2
    assert "unrecognized arguments: --learnin-rat" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layers", 0, "--layers is 0; give a number of at least 1"),
        ("batch", -12, "--batch is -12"),
        ("learning_rate", -1.0, "--learning-rate is -1.0; give a number that is not negative"),
        ("learning_rate", float("nan"), "--learning-rate is nan"),
        ("seed", -1, "--seed is -1"),
        ("dropout", 1.0, "--dropout is 1.0; give a number from 0 to below 1"),
        ("beta2", 1.5, "--beta2 is 1.5"),
        ("heads", 5, "--width 128 is no multiple of --heads 5"),
        ("schedule", "sine", "--schedule is 'sine'; give one of constant, linear, cosine"),
    ],
)
def test_values_that_cannot_work(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options(**{name: value})  # type: ignore[arg-type]


def test_precision_is_bf16_on_a_gpu_unless_the_user_says_otherwise() -> None:
    assert for_device(Options()).precision == ("bf16" if current_device().kind == "cuda" else "fp32")
    with offline.device("sm_80"):
        assert for_device(Options()).precision == "bf16"
        assert for_device(Options(precision="fp16")).precision == "fp16"


def test_names_that_may_change_exist() -> None:
    assert {item.name for item in dataclasses.fields(Options)} >= FREE_TO_CHANGE
