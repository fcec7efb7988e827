"""numstack.kernels.adamw against float64, torch.optim.AdamW over 100 steps, and ONNX's Adam."""

import numpy as np
import pytest

from numstack.device import offline
from numstack.device.cuda import sass
from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels import adamw
from numstack.kernels.adamw import SEGMENT, STRETCH, VARIANTS
from tests.golden import OnnxCase, onnx_cases
from tests.golden.torch_kernels import ADAMW, torch_case
from tests.support import BFLOAT16, assert_close, to_device, to_host

EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.runnable())
N = STRETCH + 3  # a block of ``vectors`` that is full, and one that is not
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def one(value: float):
    return to_device(np.array([value], np.float32))


def inputs(n: int) -> tuple[np.ndarray, ...]:
    """param, grad, m, v, and the decay of each segment."""
    rng = np.random.default_rng(n)
    param, grad, m = (rng.standard_normal(n, dtype=np.float32) for _ in range(3))
    decay = (0.1 * rng.integers(0, 2, -(-n // SEGMENT))).astype(np.float32)
    return param, grad, m, rng.random(n, dtype=np.float32), decay


@EVERY_VARIANT
@pytest.mark.parametrize("n", [0, 1, SEGMENT, SEGMENT + 1, 5 * SEGMENT - 3, 2 * STRETCH])
def test_one_step(n, variant):
    param, grad, m, v, decay = inputs(n)
    arrays = [to_device(a) for a in (param, grad, m, v, decay)]
    adamw.step(*arrays, **HYPER, step=3, grad_scale_1=one(0.5), variant=variant)
    expected = adamw.reference(param, grad, m, v, np.repeat(decay, SEGMENT)[:n], **HYPER, step=3, grad_scale=0.5)
    for name, got, value in zip(("param", "m", "v"), (arrays[0], *arrays[2:4]), expected, strict=True):
        assert_close(to_host(got), value, rtol=1e-6, atol=1e-6, what=name)
    np.testing.assert_array_equal(to_host(arrays[1]), grad)


@EVERY_VARIANT
def test_torch_100_steps(variant):
    """Two parameters: each starts on a segment, and the gap between them stays what it was."""
    case = torch_case("adamw")
    sizes = (300, 7)
    places = np.concatenate([np.arange(300), 2 * SEGMENT + np.arange(7)])
    assert sum(sizes) == len(places) == len(case["start"])
    n = 3 * SEGMENT

    def spread(values: np.ndarray):
        flat = np.zeros(n, np.float32)
        flat[places] = values
        return to_device(flat)

    param, m, v = spread(case["start"]), to_device(np.zeros(n, np.float32)), to_device(np.zeros(n, np.float32))
    decay = to_device(np.array([ADAMW["decay"], ADAMW["decay"], 0], np.float32))
    options = {name: ADAMW[name] for name in ("lr", "beta1", "beta2", "eps")}
    for i, grad in enumerate(case["grads"]):
        # Gradients arrive scaled, as under loss scaling, and the step takes the scale out.
        scaled = spread(4 * grad)
        adamw.step(param, scaled, m, v, decay, **options, step=i + 1, grad_scale_1=one(0.25), variant=variant)
        if i == 0:
            assert_close(to_host(param)[places], case["after_1"], rtol=1e-6, atol=1e-6)
    assert_close(to_host(param)[places], case["after_100"], rtol=1e-5, atol=2e-6)
    assert_close(to_host(m)[places], case["m"], rtol=1e-5, atol=1e-7)
    assert_close(to_host(v)[places], case["v"], rtol=1e-5, atol=1e-8)
    gap = np.setdiff1d(np.arange(n), places)
    assert not to_host(param)[gap].any()


@pytest.mark.parametrize("case", onnx_cases("Adam"), ids=lambda case: case.name)
def test_onnx(case: OnnxCase):
    """ONNX's Adam at t = 0 has no bias correction, and adds an L2 term to the gradient: a late step, without decay."""
    rate, t, *tensors = case.inputs
    assert t == 0
    n = len(tensors) // 4
    for i in range(n):
        x, grad, m, v = (tensors[i + j * n] for j in range(4))
        grad = grad + np.float32(case.attributes["norm_coefficient"]) * x
        arrays = [to_device(a) for a in (x, grad, m, v, np.zeros(1, np.float32))]
        adamw.step(
            *arrays,
            lr=float(rate),
            beta1=case.attributes["alpha"],
            beta2=case.attributes["beta"],
            eps=case.attributes["epsilon"],
            step=10**6,
            grad_scale_1=one(1),
        )
        for got, j in ((arrays[0], 0), (arrays[2], 1), (arrays[3], 2)):
            assert_close(to_host(got), case.outputs[i + j * n], rtol=1e-5, atol=1e-6)


@EVERY_VARIANT
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_skips_the_step(scale, variant):
    before = inputs(N)
    arrays = [to_device(a) for a in before]
    adamw.step(*arrays, **HYPER, step=1, grad_scale_1=one(scale), variant=variant)
    for got, kept in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(to_host(got), kept)


@EVERY_VARIANT
@pytest.mark.parametrize("step", [1, 2, 37, 100_000])
@pytest.mark.parametrize("betas", [(0.9, 0.9999), (0.0, 0.5)])
def test_step_and_learning_rate_on_the_device(step, betas, variant):
    """The bias correction is as exact as the host's float64, also where 1 - beta^t cancels."""
    options = {**HYPER, "beta1": betas[0], "beta2": betas[1], "grad_scale_1": one(0.5), "variant": variant}
    before = inputs(N)
    by_host, by_device = ([to_device(a) for a in before] for _ in range(2))
    adamw.step(*by_host, **options, step=step)
    adamw.step(*by_device, **{**options, "lr": one(HYPER["lr"])}, step=to_device(np.array([step], np.int32)))
    for got, expected, start in zip(by_device, by_host, before, strict=True):
        assert_close(to_host(got) - start, to_host(expected) - start, rtol=2e-6, atol=3e-7)


@EVERY_VARIANT
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_sixteen_bit_parameters_follow_their_float32_master(dtype, variant):
    """Steps far smaller than a 16-bit rounding still add up."""
    value, grad, m, v, decay = inputs(N)
    arrays = [to_device(a) for a in (value.astype(dtype), grad.astype(dtype), 0 * m, 0 * v, 0 * decay)]
    master = to_device(value)
    for step in range(1, 9):
        options = {**HYPER, "lr": 1e-5, "variant": variant}
        adamw.step(*arrays, **options, step=step, grad_scale_1=one(1), master=master)
    # With equal gradients, m_hat / sqrt(v_hat) is their sign.
    expected = value - 8e-5 * np.sign(grad.astype(dtype).astype(np.float64))
    assert_close(to_host(master), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(to_host(arrays[0], dtype), to_host(master).astype(dtype))


@EVERY_VARIANT
def test_under_checks(under_checks, variant):
    param, grad, m, v, decay = inputs(N)
    arrays = [to_device(a) for a in (param, grad, m, v, decay)]
    adamw.step(*arrays, **HYPER, step=3, grad_scale_1=one(1), master=to_device(param), variant=variant)
    expected = adamw.reference(
        param, grad, m, v, np.repeat(decay, SEGMENT)[: len(param)], **HYPER, step=3, grad_scale=1
    )
    assert_close(to_host(arrays[0]), expected[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_vectors_ask_for_all_they_read_before_they_wait(architecture):
    """The assembler moves loads to where they are used, unless something holds them."""
    with offline.device(architecture) as device:
        arrays = [device.array((STRETCH,), np.float32) for _ in range(4)]
        decay, scale = (device.array((n,), np.float32) for n in (STRETCH // SEGMENT, 1))
        adamw.step(*arrays, decay, **HYPER, step=1, grad_scale_1=scale, variant="vectors")
        [build] = device.builds.values()
    opcodes = [i.opcode for i in sass.disassemble(build.code)]
    assert opcodes[: [i.partition(".")[0] for i in opcodes].index("BAR")].count("LDG.E.128") == 8


def test_bad_arguments():
    param, grad, m, v, decay = inputs(300)
    with pytest.raises(ConfigError, match="adamw: step=0; the first step is step 1"):
        adamw.step(param, grad, m, v, decay, **HYPER, step=0, grad_scale_1=one(1))
    with pytest.raises(DTypeError, match="adamw: step has dtype float32; expected int32"):
        adamw.step(param, grad, m, v, decay, **HYPER, step=one(1), grad_scale_1=one(1))
    with pytest.raises(ShapeError, match=r"adamw: lr has shape \(2,\); expected \(1,\)"):
        adamw.step(param, grad, m, v, decay, **{**HYPER, "lr": decay}, step=1, grad_scale_1=one(1))
    with pytest.raises(ShapeError, match=r"adamw: decay_S has shape \(1,\); expected \(2,\)"):
        adamw.step(param, grad, m, v, decay[:1], **HYPER, step=1, grad_scale_1=one(1))
    with pytest.raises(ShapeError, match=r"adamw: grad_N has shape \(299,\); expected \(300,\)"):
        adamw.step(param, grad[1:], m, v, decay, **HYPER, step=1, grad_scale_1=one(1))
    with pytest.raises(DTypeError, match="adamw: m_N has dtype float16; expected float32"):
        adamw.step(param, grad, m.astype(np.float16), v, decay, **HYPER, step=1, grad_scale_1=one(1))
