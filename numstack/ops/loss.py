"""Losses."""

from __future__ import annotations

import math

import numpy as np

from numstack import memory
from numstack.autograd import Node, is_recorded, record
from numstack.device import Array
from numstack.errors import DataError, ShapeError
from numstack.kernels import cross_entropy as kernels
from numstack.kernels import elementwise, reduce
from numstack.ops import ids
from numstack.tensor import Tensor

IGNORED = -1
"""A target that does not count: no loss, no gradient."""


def cross_entropy(
    logits: Tensor,
    targets: np.ndarray | Tensor,
    *,
    n_targets: int | None = None,
    n_classes: int | None = None,
    gradient: float | Tensor | None = None,
) -> Tensor:
    """Mean over the targets of -log softmax(logits)[target], in nats.

    Parameters
    ----------
    logits : Tensor, shape (..., V)
        **The backward pass overwrites them with their gradient**: of all arrays of a language model they are the
        largest.
    targets : integer array or int32 Tensor, shape (...)
        Ids below ``n_classes``, or -1 for a target that does not count. An array on the host is checked and copied to
        the device.
    n_targets : int, optional
        What the sum is divided by, instead of the number of targets that count. Counting those of a Tensor waits for
        the device; give it then.
    n_classes : int, optional
        How many of the V columns are classes, if not all: those after them are padding, which never counts.
    gradient : float or Tensor of shape (1,), optional
        What ``backward`` would start from at this loss. If it is given here, one kernel reads the logits once for both
        the loss and the gradient, which **replaces the logits at once**; then call ``backward(loss)`` without one.

    Returns
    -------
    Tensor, shape (1,), float32

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    DataError
        If a target on the host is out of range, or none counts.
    """
    if logits.ndim < 1 or tuple(targets.shape) != logits.shape[:-1]:
        raise ShapeError(
            f"cross_entropy: logits have shape {logits.shape} but targets {tuple(targets.shape)}; "
            f"expected targets of shape {logits.shape[:-1]}"
        )
    n_columns = logits.shape[-1]
    if n_targets is None:
        host = targets.numpy() if isinstance(targets, Tensor) else np.asarray(targets)
        n_targets = int(np.count_nonzero(host != IGNORED))
    if n_targets < 1:
        raise DataError(f"cross_entropy: no target of {tuple(targets.shape)} counts; a mean needs at least one")
    n_rows = math.prod(targets.shape)
    n_ids = n_columns if n_classes is None else n_classes
    targets_R = ids.to_device("cross_entropy", "targets", targets, n_ids, ignored=IGNORED).array.reshape(n_rows)
    logits_RV = logits.array.reshape(n_rows, n_columns)
    loss_R = memory.empty((n_rows,), np.float32, scope="workspace")
    loss_1 = memory.empty((1,), np.float32, scope="forward")

    if gradient is not None and is_recorded(logits):
        scale_1 = memory.empty((1,), np.float32, scope="workspace")
        if isinstance(gradient, Tensor):
            elementwise.scale(gradient.array, scale_1, 1 / n_targets)
        else:
            elementwise.fill(scale_1, gradient / n_targets)
        kernels.forward_backward(
            logits_RV, targets_R, loss_R, logits_RV, scale_1, n_classes=n_ids, ignore_index=IGNORED
        )
        _mean(loss_R, loss_1, n_targets)
        return record("cross_entropy", loss_1, (logits,), lambda node: node.give(0, logits_RV), is_start=True)

    lse_R = memory.empty((n_rows,), np.float32, scope="forward")
    kernels.forward(logits_RV, targets_R, loss_R, lse_R, n_classes=n_ids, ignore_index=IGNORED)
    _mean(loss_R, loss_1, n_targets)

    def backward(node: Node) -> None:
        scale_1 = node.gradient
        elementwise.scale(scale_1, scale_1, 1 / n_targets)
        kernels.backward(logits_RV, targets_R, lse_R, logits_RV, scale_1, n_classes=n_ids, ignore_index=IGNORED)
        node.give(0, logits_RV)

    return record("cross_entropy", loss_1, (logits,), backward)


def _mean(loss_R: Array, loss_1: Array, n_targets: int) -> None:
    """The sum of all losses, divided by the number of targets that count."""
    workspace = memory.empty((reduce.workspace_size(loss_R.size),), np.float32, scope="workspace")
    reduce.sum(loss_R, loss_1, workspace)
    elementwise.scale(loss_1, loss_1, 1 / n_targets)
