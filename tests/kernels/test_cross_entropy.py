"""numstack.kernels.cross_entropy: every variant against float64, against PyTorch's gradients and ONNX's cases."""

import numpy as np
import pytest

from numstack.device import offline
from numstack.errors import DTypeError, ShapeError
from numstack.kernels import cross_entropy
from numstack.kernels import cross_entropy_rows as on_chip
from numstack.kernels import cross_entropy_vectors as by_vectors
from numstack.kernels.rows import row_of
from tests.golden import OnnxCase, onnx_cases
from tests.golden.torch_kernels import IGNORED, torch_case
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

SHORT_SPAN = by_vectors.SHORT_BLOCK * by_vectors.VECTOR * by_vectors.PER_THREAD
LONG_SPAN = by_vectors.LONG_BLOCK * by_vectors.VECTOR * by_vectors.PER_THREAD
SHAPES = {
    "one class": (2, 1),
    "one class past a warp, one row past a block": (cross_entropy.BLOCK + 1, 33),
    "a vocabulary of characters": (50, 84),
    "a long row": (3, cross_entropy.LONG_ROW + 1),
    "no row": (0, 8),
}
VECTOR_SHAPES = {
    "one vector past a warp of them": (4, 264),
    "one vector past the span of a short block": (5, SHORT_SPAN + 8),
    "no row": (0, 256),
}
LONG_BLOCK_SHAPES = {"a span of a long block, and vectors of its first threads": (3, LONG_SPAN + 80)}
BY_VECTORS = ("vectors", "row_in_shared", "rows_on_chip", "rows_in_turn", "rows_in_clusters")
IGNORE = -100
COMMAND = "NUMSTACK_DEVICE=cuda python -m pytest tests/kernels/test_cross_entropy.py"
# forward and forward_backward in the variants of one idea
PAIRS = [
    ("vectors" if variant in BY_VECTORS else variant, variant) for variant in cross_entropy.FORWARD_BACKWARD.runnable()
]
BACKWARD = cross_entropy.BACKWARD.runnable()


def shapes(variant: str) -> dict[str, tuple[int, int]]:
    """Those that mean something to the variant."""
    return VECTOR_SHAPES if variant in BY_VECTORS else SHAPES


def inputs(R: int, V: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits and targets: the first and last class among them, and every fourth row ignored."""
    rng = np.random.default_rng(R * 1000 + V)
    logits = 3 * rng.standard_normal((R, V), dtype=np.float32)
    targets = rng.integers(0, V, R).astype(np.int32)
    targets[:2] = [0, V - 1][: min(R, 2)]
    targets[3::4] = IGNORE
    return logits, targets


def forward(logits, targets, ignore_index=IGNORE, **options) -> tuple[np.ndarray, np.ndarray]:
    loss, lse = (to_device(poisoned(len(targets))) for _ in range(2))
    cross_entropy.forward(to_device(logits), to_device(targets), loss, lse, ignore_index=ignore_index, **options)
    return to_host(loss), to_host(lse)


def forward_backward(logits, targets, scale, ignore_index=IGNORE, dtype=np.float32, **options):
    loss, dlogits = to_device(poisoned(len(targets))), to_device(poisoned(logits.shape, dtype))
    cross_entropy.forward_backward(
        to_device(logits), to_device(targets), loss, dlogits, device_scale(scale), ignore_index=ignore_index, **options
    )
    return to_host(loss), to_host(dlogits)


def device_scale(scale: float):
    return to_device(np.array([scale], np.float32))


@pytest.mark.parametrize("variant", cross_entropy.FORWARD.runnable())
def test_forward_at_every_shape(variant):
    for what, shape in shapes(variant).items():
        logits, targets = inputs(*shape)
        loss, lse = forward(logits, targets, variant=variant)
        expected_loss, expected_lse = cross_entropy.reference(logits, targets, ignore_index=IGNORE)
        assert_close(loss, expected_loss, atol=1e-5, what=f"loss of {what}")
        assert_close(lse, expected_lse, what=f"lse of {what}")


@pytest.mark.parametrize("variant", cross_entropy.FORWARD_BACKWARD.runnable())
def test_forward_backward_at_every_shape(variant):
    more = LONG_BLOCK_SHAPES if variant in BY_VECTORS else {}
    for what, shape in (shapes(variant) | more).items():
        logits, targets = inputs(*shape)
        loss, dlogits = forward_backward(logits, targets, 0.25, variant=variant)
        expected = cross_entropy.reference_backward(logits, targets, 0.25, ignore_index=IGNORE)
        assert_close(loss, cross_entropy.reference(logits, targets, ignore_index=IGNORE)[0], atol=1e-5, what=what)
        assert_close(dlogits, expected, what=f"dlogits of {what}")


@pytest.mark.parametrize("variant", BACKWARD)
def test_backward_from_lse(variant):
    for what, shape in shapes(variant).items():
        logits, targets = inputs(*shape)
        _, lse = cross_entropy.reference(logits, targets, ignore_index=IGNORE)
        dlogits = to_device(poisoned(shape))
        cross_entropy.backward(
            to_device(logits),
            to_device(targets),
            to_device(lse.astype(np.float32)),
            dlogits,
            device_scale(2),
            ignore_index=IGNORE,
            variant=variant,
        )
        expected = cross_entropy.reference_backward(logits, targets, 2, ignore_index=IGNORE)
        assert_close(to_host(dlogits), expected, atol=1e-5, what=what)


@pytest.mark.parametrize("variant", cross_entropy.FORWARD_BACKWARD.runnable())
def test_gradient_in_place_of_the_logits(variant):
    for shape in shapes(variant).values():
        logits, targets = inputs(*shape)
        array, loss = to_device(logits), to_device(poisoned(shape[0]))
        cross_entropy.forward_backward(
            array, to_device(targets), loss, array, device_scale(1), ignore_index=IGNORE, variant=variant
        )
        expected_loss, _ = cross_entropy.reference(logits, targets, ignore_index=IGNORE)
        expected = cross_entropy.reference_backward(logits, targets, 1, ignore_index=IGNORE)
        assert_close(to_host(loss), expected_loss, atol=1e-5)
        assert_close(to_host(array), expected)


@pytest.mark.parametrize("variant", BACKWARD)
def test_backward_in_place_of_the_logits(variant):
    for shape in shapes(variant).values():
        logits, targets = inputs(*shape)
        _, lse = cross_entropy.reference(logits, targets, ignore_index=IGNORE)
        array, lse = to_device(logits), to_device(lse.astype(np.float32))
        options = {"ignore_index": IGNORE, "variant": variant}
        cross_entropy.backward(array, to_device(targets), lse, array, device_scale(1), **options)
        expected = cross_entropy.reference_backward(logits, targets, 1, ignore_index=IGNORE)
        assert_close(to_host(array), expected, atol=1e-5)


@pytest.mark.parametrize(("of_forward", "variant"), PAIRS)
def test_padding_of_the_rows_counts_for_nothing(of_forward, variant):
    """Whatever it holds: it is not in the sum, no target may point there, and its gradient is 0."""
    long = (cross_entropy.LONG_ROW - 7, cross_entropy.LONG_ROW)
    for n_classes, V in (
        (long, (300, 512), (SHORT_SPAN - 4, SHORT_SPAN + 8)) if "by" not in variant else ((40, 64), long)
    ):
        logits, targets = inputs(5, n_classes)
        padded = np.full((5, V), np.nan, np.float32)
        padded[:, :n_classes] = logits
        padded[0, n_classes:] = 1e30
        options = {"n_classes": n_classes, "variant": variant}
        forward_options = {"n_classes": n_classes, "variant": of_forward}
        expected_loss, expected_lse = cross_entropy.reference(logits, targets, ignore_index=IGNORE)
        expected = np.zeros((5, V))
        expected[:, :n_classes] = cross_entropy.reference_backward(logits, targets, 0.5, ignore_index=IGNORE)
        loss, lse = forward(padded, targets, **forward_options)
        assert_close(loss, expected_loss, atol=1e-5)
        assert_close(lse, expected_lse)
        loss, dlogits = forward_backward(padded, targets, 0.5, **options)
        assert_close(loss, expected_loss, atol=1e-5)
        assert_close(dlogits, expected)
        dlogits = to_device(poisoned((5, V)))
        arrays = (to_device(x) for x in (padded, targets, lse))
        backward_options = {"n_classes": n_classes, "ignore_index": IGNORE}
        backward_options["variant"] = "block_per_row" if of_forward == "thread_per_row" else of_forward
        cross_entropy.backward(*arrays, dlogits, device_scale(0.5), **backward_options)
        assert_close(to_host(dlogits), expected, atol=1e-5)
        targets[0] = n_classes
        assert np.isnan(forward(padded, targets, **forward_options)[0][0])


def test_reference_backward_by_finite_differences():
    logits, targets = inputs(5, 6)
    logits = logits.astype(np.float64)
    gradient = cross_entropy.reference_backward(logits, targets, 0.5, ignore_index=IGNORE)
    for i in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[i] = 1e-6
        up, down = (cross_entropy.reference(logits + s, targets, ignore_index=IGNORE)[0].sum() for s in (step, -step))
        assert abs(0.5 * (up - down) / 2e-6 - gradient[i]) < 1e-8


@pytest.mark.parametrize(("of_forward", "variant"), PAIRS)
def test_a_target_that_is_no_class_gives_nan_and_harms_no_other_row(of_forward, variant):
    logits, _ = inputs(4, 264)
    targets = np.array([1, 264, -1, 2**31 - 1], np.int32)
    for loss in (
        forward(logits, targets, variant=of_forward)[0],
        forward_backward(logits, targets, 1, variant=variant)[0],
    ):
        assert np.isfinite(loss[0]) and np.isnan(loss[1:]).all()
    _, dlogits = forward_backward(logits, targets, 1, variant=variant)
    assert np.isfinite(dlogits[0]).all() and np.isnan(dlogits[1:]).all()


@pytest.mark.parametrize(("of_forward", "variant"), PAIRS)
def test_ignored_rows_are_zero_whatever_they_hold(of_forward, variant):
    logits = np.full((3, 264), np.nan, np.float32)
    targets = np.full(3, -1, np.int32)
    loss, lse = forward(logits, targets, -1, variant=of_forward)
    assert not loss.any() and not lse.any()
    loss, dlogits = forward_backward(logits, targets, 1, -1, variant=variant)
    assert not loss.any() and not dlogits.any()


@pytest.mark.parametrize("variant", cross_entropy.FORWARD.runnable())
def test_large_logits_do_not_overflow(variant):
    logits = np.full((2, 264), -3e38, np.float32)
    logits[:, 7] = 3e38
    loss, _ = forward(logits, np.array([7, 7], np.int32), variant=variant)
    assert_close(loss, np.zeros(2))


SIXTEEN_BITS = [(variant, BFLOAT16) for variant in cross_entropy.FORWARD_BACKWARD.runnable()]


@pytest.mark.parametrize(("variant", "dtype"), [*SIXTEEN_BITS, ("rows_in_turn", np.dtype(np.float16))], ids=str)
def test_sixteen_bits(variant, dtype):
    logits, targets = inputs(6, 264)
    logits = logits.astype(dtype)
    stored = np.uint16 if dtype == BFLOAT16 else dtype
    loss, dlogits = forward_backward(logits, targets, 1, dtype=stored, variant=variant)
    assert_close(loss, cross_entropy.reference(logits, targets, ignore_index=IGNORE)[0], atol=1e-5)
    expected = cross_entropy.reference_backward(logits, targets, 1, ignore_index=IGNORE)
    assert_close(dlogits.view(dtype), expected, dtype=str(dtype))


def test_torch():
    case = torch_case("cross_entropy")
    n_targets = int((case["targets"] != IGNORED).sum())
    loss, dlogits = forward_backward(case["logits"], case["targets"], 1 / n_targets, IGNORED)
    assert_close(loss, case["loss"], atol=1e-5)
    assert_close(dlogits, case["dlogits"])


@pytest.mark.parametrize("case", onnx_cases("SoftmaxCrossEntropyLoss"), ids=lambda case: case.name)
def test_onnx(case: OnnxCase):
    """Classes are axis 1; log-probabilities, where there are any, are logits - lse."""
    logits = np.moveaxis(case.inputs[0], 1, -1)
    rows = np.ascontiguousarray(logits).reshape(-1, logits.shape[-1])
    targets = case.inputs[1].astype(np.int32)
    ignore_index = case.attributes.get("ignore_index", -1)
    loss, lse = forward(rows, targets.reshape(-1), ignore_index)
    kept = targets.reshape(-1) != ignore_index
    reduced = {"none": loss.reshape(targets.shape), "sum": loss.sum(), "mean": loss.sum() / kept.sum()}
    assert_close(reduced[case.attributes["reduction"]], case.outputs[0], rtol=1e-5, atol=1e-5)
    if len(case.outputs) == 2:
        log_probabilities = np.moveaxis(case.outputs[1], 1, -1).reshape(rows.shape)
        assert_close((rows - lse[:, None])[kept], log_probabilities[kept], atol=1e-5)


@pytest.mark.parametrize(("of_forward", "variant"), PAIRS)
def test_under_checks(under_checks, of_forward, variant):
    logits, targets = inputs(5, 256 if of_forward == "vectors" else 35)
    expected = cross_entropy.reference(logits, targets, ignore_index=IGNORE)[0]
    loss, lse = forward(logits, targets, variant=of_forward)
    assert_close(loss, expected, atol=1e-5)
    loss, dlogits = forward_backward(logits, targets, 1, variant=variant)
    assert_close(loss, expected, atol=1e-5)
    backward = to_device(poisoned(logits.shape))
    options = {"ignore_index": IGNORE, "variant": of_forward if of_forward in BACKWARD else None}
    arrays = (to_device(x) for x in (logits, targets, lse))
    cross_entropy.backward(*arrays, backward, device_scale(1), **options)
    assert_close(to_host(backward), dlogits, atol=1e-5)


@pytest.mark.parametrize("variant", ["row_in_shared", "rows_on_chip"])
def test_a_row_longer_than_shared_memory(variant, monkeypatch):
    """What does not fit is read twice."""
    monkeypatch.setattr(cross_entropy, "_kept_elements", lambda V, itemsize, span: span)
    monkeypatch.setattr(on_chip, "n_spans", lambda nbytes, threads, most: 1)
    logits, targets = inputs(9, 2 * SHORT_SPAN + 88)
    logits = logits.astype(BFLOAT16)
    array, loss = to_device(logits), to_device(poisoned(9))
    cross_entropy.forward_backward(
        array, to_device(targets), loss, array, device_scale(100), ignore_index=IGNORE, variant=variant
    )
    assert_close(to_host(loss), cross_entropy.reference(logits, targets, ignore_index=IGNORE)[0], atol=1e-5)
    expected = cross_entropy.reference_backward(logits, targets, 100, ignore_index=IGNORE)
    assert_close(to_host(array, BFLOAT16), expected, dtype="bfloat16")


@pytest.mark.parametrize(("V", "itemsize", "kept"), [(50304, 2, 50304), (131072, 2, 49152), (50304, 4, 16384)])
def test_two_rows_fit_a_multiprocessor(V, itemsize, kept):
    n_kept = cross_entropy._kept_elements(V, itemsize, LONG_SPAN)
    assert n_kept == kept
    assert 2 * (n_kept * itemsize + 1024 + 512) <= 233_472


def test_a_row_of_131072_stays_on_the_chip():
    n_spans = on_chip.n_spans(2 * 131072, 1024, 232_448 - cross_entropy.SHARED_BESIDES)
    assert n_spans * on_chip.span_bytes(1024) + 16 * 1024 * on_chip.HELD == 2 * 131072


@pytest.mark.parametrize(
    ("V", "dtype", "name"),
    [
        (32768, np.uint16, "rows_in_turn"),
        (50304, np.uint16, "rows_on_chip"),
        (131072, np.uint16, "rows_in_clusters"),
        (50304, np.float32, "row_in_shared"),
        (1024, np.uint16, "row_in_shared"),
        (50257, np.uint16, "block_per_row"),
    ],
)
def test_defaults_on_a_gpu(V, dtype, name):
    with offline.device("sm_90a") as device:
        logits = device.array((4, V), dtype)
        assert cross_entropy.FORWARD_BACKWARD.pick(None, row_of(V, logits), logits.itemsize, False).name == name


@pytest.mark.skipif(
    "rows_in_clusters" not in cross_entropy.FORWARD_BACKWARD.runnable(), reason=f"needs a Hopper GPU: {COMMAND}"
)
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
def test_rows_that_are_left_over(dtype):
    """Those of the last turn go to clusters, the others to blocks beside them; or all rows to clusters, or none."""
    n_blocks = cross_entropy._resident_blocks(by_vectors.SHORT_BLOCK, 0)
    stored = np.uint16 if dtype == BFLOAT16 else dtype
    for n_rows in (n_blocks + 5, 5, n_blocks + n_blocks // 2):
        logits, targets = inputs(n_rows, 264)
        logits = logits.astype(dtype)
        loss, dlogits = forward_backward(logits, targets, 0.5, dtype=stored, variant="rows_in_clusters")
        assert_close(loss, cross_entropy.reference(logits, targets, ignore_index=IGNORE)[0], atol=1e-5)
        expected = cross_entropy.reference_backward(logits, targets, 0.5, ignore_index=IGNORE)
        assert_close(dlogits.view(dtype), expected, dtype=str(dtype))


def test_bad_arguments():
    logits, targets = inputs(4, 8)
    with pytest.raises(DTypeError, match="cross_entropy: targets_R has dtype int64; expected int32"):
        forward(logits, targets.astype(np.int64))
    with pytest.raises(ShapeError, match=r"cross_entropy: targets_R has shape \(3,\); expected \(4,\)"):
        forward(logits, targets[:3])
    with pytest.raises(ShapeError, match=r"cross_entropy: scale_1 has shape \(2,\); expected \(1,\)"):
        cross_entropy.forward_backward(
            *(to_device(a) for a in (logits, targets, np.empty(4, np.float32), logits, np.empty(2, np.float32)))
        )
    with pytest.raises(ShapeError, match="cross_entropy: logits_RV has 3 axes"):
        forward(logits[None], targets)
