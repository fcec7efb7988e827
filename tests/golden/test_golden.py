"""The golden files still say what their sources say."""

import os

import numpy as np
import pytest

from tests.golden import onnx_cases

OPERATORS = {
    "Gemm": 11,
    "Gelu": 4,
    "LayerNormalization": 19,
    "Softmax": 7,
    "SoftmaxCrossEntropyLoss": 16,
    "Attention": 11,
    "Adam": 2,
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_onnx_file_holds_every_operator(operator):
    cases = onnx_cases(operator)
    assert len(cases) == OPERATORS[operator]
    assert all(case.inputs and case.outputs for case in cases)


@pytest.mark.skipif(os.environ.get("NUMSTACK_ORACLES") != "1", reason="make test ORACLES=1 runs it")
def test_onnx_file_equals_what_onnx_collects_now():
    from tests.golden.make_onnx import collect

    for operator, live_cases in collect().items():
        kept = {case.name: case for case in onnx_cases(operator)}
        assert kept.keys() == {case.name for case in live_cases}
        for live in live_cases:
            golden = kept[live.name]
            assert golden.attributes == live.attributes
            for expected, got in zip(live.inputs + live.outputs, golden.inputs + golden.outputs, strict=True):
                np.testing.assert_array_equal(got, expected, err_msg=live.name)
