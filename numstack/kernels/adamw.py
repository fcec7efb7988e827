"""AdamW over all parameters of a model in one launch.

All parameters lie in one flat buffer param_N, their gradients in grad_N, the moments in m_N and v_N. Each parameter
starts on a multiple of SEGMENT elements, so that the weight decay of an element is that of its segment: decay_S.

At step t = 1, 2, ... with gradient g = grad_scale_1 grad::

    m     = beta1 m + (1 - beta1) g
    v     = beta2 v + (1 - beta2) g^2
    m_hat = m / (1 - beta1^t)                          (bias correction)
    v_hat = v / (1 - beta2^t)
    param = param - lr (decay param + m_hat / (sqrt(v_hat) + eps))

The decay is decoupled: it acts on the parameter, not through the gradient. ``grad_scale_1`` is read on the device (a
clipping factor, one over a loss scale); if it is not finite, nothing is changed: a step that overflowed is skipped
without the host knowing. Then only the device knows t, and ``step`` is its count. With ``master``, float32 copies of
the parameters are updated, and rounded into param. Step and learning rate may both be on the device, so that launches
that were captured once can be replayed for every step.

Ladder: ``thread_per_element`` has a block for each segment. Each element costs 28 bytes, of four arrays. ``vectors``
reads eight neighbours of each at once, 32 bytes a lane and a kilobyte a warp, so that what is side by side in memory is
asked for together; results go through shared memory, so that a warp stores 512 bytes side by side. All is asked for
before the step is known to count, weight decay and scale with it. The barrier behind the loads keeps the assembler from
moving some of them to where they are used, which costs 2%. What is read and written again, parameters and moments, is
asked for as lines that the second cache gives up last (``L2::evict_last``), and written as lines like any other
(``numstack.device.ptx.lines``). On an H200, 124M parameters, steps in a row: 4.33 TB/s, with a bfloat16 copy 4.29;
without the hints 4.25 to 4.26 and 4.21 to 4.22, as PyTorch's compiled formula, whose weight decay and scale are
constants, so that it reads nothing else. 0.2% is the start of a kernel, hidden behind the one ahead; the decay costs
0.06%.

The hints gain 1.7% and 1.8% by as many bytes from and to memory, also where each step finds other arrays. Nothing stays
behind: six additions in 24, 30, 36 or 45 MiB take 35, 46, 56 and 76 us after such a step, as after one without hints.
The hint of the stores is what releases lines. If they have none, the lines outlive the step, in the way of what works
in the cache: 37, 51, 66 and 82 us; it takes gigabytes of other data, or ``cuCtxResetPersistingL2Cache``, to be rid of
them. A gradient, which is only read, would gain 0.4% more, but its lines would have to be released one by one
(``applypriority``), which is nearly free here, and costs kernels that write other arrays than they read all they gain.
Kept lines that pass by the first cache (``.cg``) would be another 0.2%.

Beside the rate without hints, in the same runs: two elements of each array at once, or four where there is a 16-bit
array, 0.997 to 1.001; blocks of 96 threads 0.999, of 64 0.998, of 160 and more 0.99; stored as they were loaded,
without shared memory 0.95, by shuffles between two lanes 0.999, exchanged within a warp 0.997, all three arrays at once
0.998, by bulk copies 0.997 to 1.001; no bounds, addresses for arrays 1.000 to 1.002; approximate roots and quotients
0.998 to 1.001; the next blocks' lines asked for ahead 0.67 to 0.95, the first blocks' before the kernel ahead is over
0.998; lines of 256 bytes asked for 0.993, past the first cache 1.001; m and v in one array, by blocks in turn, 0.993,
all four 0.975; neighbouring blocks 64 or 512 stretches apart 1.000 and 0.997; arrays at other places in memory 0.999 to
1.002. Beside two elements at once: loads and stores that tell the cache to forget 0.97 and 0.98, loads by bulk copies
0.95, blocks that stay 0.92, blocks from both halves of the buffer in turn 0.99.

Source: Loshchilov, Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, float32

from numstack.device import Array, Kernel, Stream, kernel, narrow, widen
from numstack.device.ptx import load4, load8, store4, store8
from numstack.device.ptx.lines import load8_kept, store4_released
from numstack.errors import ConfigError
from numstack.kernels.launch import (
    are_aligned,
    ceil_div,
    check_contiguous,
    check_dtype,
    check_floats,
    check_ndim,
    check_shape,
)
from numstack.kernels.variants import Variant, Variants

SEGMENT = 256
"""Elements that share one weight decay, and threads of a block of ``thread_per_element``."""
SEGMENT_BITS = SEGMENT.bit_length() - 1
BLOCK, WIDTH, PIECE = 128, 8, 4  # of ``vectors``: threads of a block, neighbours of a thread, those it writes at once
STRETCH = BLOCK * WIDTH  # elements of a block


def reference(
    param_N: np.ndarray,
    grad_N: np.ndarray,
    m_N: np.ndarray,
    v_N: np.ndarray,
    decay_N: np.ndarray,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    grad_scale: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(param_N, m_N, v_N)`` after the step, in float64; decay_N is given for each element."""
    param, grad, m, v, decay = (np.asarray(a, np.float64) for a in (param_N, grad_N, m_N, v_N, decay_N))
    if not math.isfinite(grad_scale):
        return param, m, v
    grad = grad * grad_scale
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad**2
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    return param - lr * (decay * param + m_hat / (np.sqrt(v_hat) + eps)), m, v


@cuda.jit(device=True)
def _updated(value, m, v, grad, decay, lr, rate1, rate2, eps, correct1, correct2):
    """``(value, m, v)`` of an element after the step.

    rate = 1 - beta and correct = 1 / (1 - beta^t) come rounded from the host's float64: 1 - beta2 in float32 would be
    off by 1e-5.
    """
    m += rate1 * (grad - m)
    v += rate2 * (grad * grad - v)
    update = m * correct1 / (math.sqrt(v * correct2) + eps)
    return value - lr * (decay * value + update), m, v


@cuda.jit(device=True)
def _correction(bias, steps_1, counted):
    """1 / (1 - beta^t): bias itself, or of the count t where bias is log(beta).

    expm1 keeps the digits that 1 - beta^t would lose where beta^t is close to 1.
    """
    if counted:
        return float32(-1) / math.expm1(bias * float32(steps_1[0]))
    return bias


@cuda.jit(device=True)
def _learning_rate(lr, lr_1, scheduled):
    """lr itself, or what the device has."""
    return lr_1[0] if scheduled else lr


@kernel
def _step(
    param_N,
    grad_N,
    m_N,
    v_N,
    decay_S,
    grad_scale_1,
    steps_1,
    counted,
    lr_1,
    scheduled,
    lr,
    rate1,
    rate2,
    eps,
    bias1,
    bias2,
):
    i = cuda.grid(1)
    scale = grad_scale_1[0]
    decay = decay_S[cuda.blockIdx.x]
    rate = _learning_rate(lr, lr_1, scheduled)
    correct1 = _correction(bias1, steps_1, counted)
    correct2 = _correction(bias2, steps_1, counted)
    if i < param_N.size and math.isfinite(scale):
        grad = widen(grad_N[i]) * scale
        value, m, v = _updated(
            widen(param_N[i]), m_N[i], v_N[i], grad, decay, rate, rate1, rate2, eps, correct1, correct2
        )
        param_N[i] = narrow(value, param_N.dtype)
        m_N[i] = m
        v_N[i] = v


@kernel
def _step_master(
    param_N, master_N, grad_N, m_N, v_N, decay_S, grad_scale_1, steps_1, counted, lr_1, scheduled,
    lr, rate1, rate2, eps, bias1, bias2
):  # fmt: skip
    i = cuda.grid(1)
    scale = grad_scale_1[0]
    decay = decay_S[cuda.blockIdx.x]
    rate = _learning_rate(lr, lr_1, scheduled)
    correct1 = _correction(bias1, steps_1, counted)
    correct2 = _correction(bias2, steps_1, counted)
    if i < param_N.size and math.isfinite(scale):
        grad = widen(grad_N[i]) * scale
        value, m, v = _updated(master_N[i], m_N[i], v_N[i], grad, decay, rate, rate1, rate2, eps, correct1, correct2)
        param_N[i] = narrow(value, param_N.dtype)
        master_N[i] = value
        m_N[i] = m
        v_N[i] = v


def _stretch_store(store_piece: Callable[..., None]) -> Any:
    """A device function that stores a block's stretch from element ``first`` on, its pieces by ``store_piece``."""

    @cuda.jit(device=True)
    def store(x_N, first, values, exchanged):
        piece = cuda.local.array(PIECE, float32)
        store8(exchanged, WIDTH * cuda.threadIdx.x, values, 0)
        cuda.syncthreads()
        for start in range(0, STRETCH, PIECE * BLOCK):  # by each access a warp writes what lies side by side
            place = start + PIECE * cuda.threadIdx.x
            load4(exchanged, place, piece, 0)
            store_piece(x_N, first + place, piece, 0)
        cuda.syncthreads()

    return store


@functools.cache
def _step_vectors(has_master: bool, is_counted: bool, is_wide: bool) -> Kernel:
    """The kernel of the variant ``vectors``; without a master param_N is its own.

    ``is_counted``: steps_1 holds t. Its expm1 takes registers, and with them threads, from those who know t before.
    ``is_wide``: what is updated is float32, as the moments are.
    """
    store_moment = _stretch_store(store4_released)
    load_value, store_value = (load8_kept, store_moment) if is_wide else (load8, _stretch_store(store4))

    @kernel(name=f"adamw.{'step_master' if has_master else 'step'} vectors", starts_early=True)
    def step(
        param_N, master_N, grad_N, m_N, v_N, decay_S, grad_scale_1, steps_1, lr_1, scheduled,
        lr, rate1, rate2, eps, bias1, bias2
    ):  # fmt: skip
        value = cuda.local.array(WIDTH, float32)
        grad = cuda.local.array(WIDTH, float32)
        m = cuda.local.array(WIDTH, float32)
        v = cuda.local.array(WIDTH, float32)
        exchanged = cuda.shared.array(STRETCH, float32)
        n = param_N.size
        first = cuda.blockIdx.x * STRETCH
        if first + STRETCH <= n:
            start = first + WIDTH * cuda.threadIdx.x
            load8(grad_N, start, grad, 0)
            load8_kept(m_N, start, m, 0)
            load_value(master_N, start, value, 0)
            load8_kept(v_N, start, v, 0)
            decay = decay_S[start >> SEGMENT_BITS]
            scale = grad_scale_1[0]
            # The assembler moves no load behind a barrier. Without, it asks for some when others have come.
            cuda.syncthreads()
            counts = math.isfinite(scale)
            rate = _learning_rate(lr, lr_1, scheduled)
            correct1 = _correction(bias1, steps_1, is_counted)
            correct2 = _correction(bias2, steps_1, is_counted)
            for e in range(WIDTH):
                new_value, new_m, new_v = _updated(
                    value[e], m[e], v[e], grad[e] * scale, decay, rate, rate1, rate2, eps, correct1, correct2
                )
                value[e] = new_value if counts else value[e]
                m[e] = new_m if counts else m[e]
                v[e] = new_v if counts else v[e]
            store_moment(v_N, first, v, exchanged)
            store_moment(m_N, first, m, exchanged)
            store_value(master_N, first, value, exchanged)
            if has_master and counts:
                store8(param_N, start, value, 0)
        elif math.isfinite(grad_scale_1[0]):
            rate = _learning_rate(lr, lr_1, scheduled)
            correct1 = _correction(bias1, steps_1, is_counted)
            correct2 = _correction(bias2, steps_1, is_counted)
            for i in range(first + cuda.threadIdx.x, n, BLOCK):
                new_value, m_N[i], v_N[i] = _updated(
                    widen(master_N[i]), m_N[i], v_N[i], widen(grad_N[i]) * grad_scale_1[0], decay_S[i >> SEGMENT_BITS],
                    rate, rate1, rate2, eps, correct1, correct2,
                )  # fmt: skip
                master_N[i] = narrow(new_value, master_N.dtype)
                if has_master:
                    param_N[i] = narrow(new_value, param_N.dtype)

    return step


def _launch_elements(param: Array, master: Array | None, rest: tuple[Any, ...], stream: Stream | None) -> None:
    grid = ceil_div(param.size, SEGMENT)
    if master is None:
        _step[grid, SEGMENT, stream](param, *rest, flops=14 * param.size)
    else:
        _step_master[grid, SEGMENT, stream](param, master, *rest, flops=14 * param.size)


def _launch_vectors(param: Array, master: Array | None, rest: tuple[Any, ...], stream: Stream | None) -> None:
    *arrays, is_counted, lr_1, scheduled, lr, rate1, rate2, eps, bias1, bias2 = rest
    updated = param if master is None else master
    kernel_ = _step_vectors(master is not None, is_counted, updated.dtype == np.float32)
    values = (param, updated, *arrays, lr_1, scheduled, lr, rate1, rate2, eps, bias1, bias2)
    kernel_[ceil_div(param.size, STRETCH), BLOCK, stream](*values, flops=14 * param.size)


VARIANTS = Variants(
    "adamw",
    [
        Variant("thread_per_element", _launch_elements, "The formula; a block for each segment."),
        Variant("vectors", _launch_vectors, "Eight elements of each array at once.", are_aligned, made_for="gpu"),
    ],
)


def step(
    param_N: Array,
    grad_N: Array,
    m_N: Array,
    v_N: Array,
    decay_S: Array,
    *,
    lr: float | Array,
    beta1: float,
    beta2: float,
    eps: float,
    step: int | Array,
    grad_scale_1: Array,
    master: Array | None = None,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """One AdamW step over a flat buffer of parameters, in place.

    Parameters
    ----------
    param_N, grad_N : array, shape (N,), floating
    m_N, v_N : array, shape (N,), float32
        Moments; zero before the first step.
    decay_S : array, shape (ceil(N / SEGMENT),), float32
        Weight decay of each segment; 0 for biases, gains and embeddings that should keep their size.
    lr : float, or array, shape (1,), float32
        Learning rate. On the device where captured launches are replayed while it changes.
    beta1, beta2, eps : float
    step : int, or array, shape (1,), int32
        Counts from 1. On the device where steps may be skipped: then it is t of this step if it is taken.
    grad_scale_1 : array, shape (1,), float32
        Multiplied into the gradient; not finite: the step changes nothing.
    master : array, shape (N,), float32, optional
        Float32 copies of 16-bit parameters: they are updated, param_N gets them rounded.
    variant : str, optional
        A name in ``VARIANTS``.

    Raises
    ------
    ConfigError
        If step is less than 1.
    ShapeError, DTypeError
        If an array does not fit param_N.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    if isinstance(step, int) and step < 1:
        raise ConfigError(f"adamw: step={step}; the first step is step 1")
    check_ndim("adamw", 1, param_N=param_N)
    shape = param_N.shape
    moments = {"m_N": m_N, "v_N": v_N} if master is None else {"m_N": m_N, "v_N": v_N, "master": master}
    check_shape("adamw", shape, grad_N=grad_N, **moments)
    check_shape("adamw", (ceil_div(param_N.size, SEGMENT),), decay_S=decay_S)
    check_shape("adamw", (1,), grad_scale_1=grad_scale_1)
    check_floats("adamw", param_N=param_N, grad_N=grad_N)
    check_dtype("adamw", np.float32, decay_S=decay_S, grad_scale_1=grad_scale_1, **moments)
    check_contiguous("adamw", param_N=param_N, grad_N=grad_N, decay_S=decay_S, **moments)
    # decay_S stands in for what is not on the device; the kernel does not touch it.
    if isinstance(step, int):
        steps_1, counted, biases = decay_S, False, [1 / (1 - beta**step) for beta in (beta1, beta2)]
    else:
        check_shape("adamw", (1,), step=step)
        check_dtype("adamw", np.int32, step=step)
        steps_1, counted, biases = step, True, [math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2)]
    if isinstance(lr, (int, float)):
        lr_1, scheduled, rate = decay_S, False, lr
    else:
        check_shape("adamw", (1,), lr=lr)
        check_dtype("adamw", np.float32, lr=lr)
        lr_1, scheduled, rate = lr, True, 0.0
    constants = (float(x) for x in (rate, 1 - beta1, 1 - beta2, eps, *biases))
    rest = (grad_N, m_N, v_N, decay_S, grad_scale_1, steps_1, counted, lr_1, scheduled, *constants)
    VARIANTS.pick(variant, param_N, grad_N, *moments.values()).launch(param_N, master, rest, stream)
