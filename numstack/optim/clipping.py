"""Clipping of gradients by their global norm, without the host ever waiting for it."""

from __future__ import annotations

import numpy as np

from numstack import memory
from numstack.device import current_device
from numstack.kernels import reduce
from numstack.nn.parameters import ParameterStore
from numstack.optim.loss_scaler import LossScaler
from numstack.tensor import Tensor


class GradientClipper:
    """Measures the norm of all gradients together, and the factor that keeps it within bounds.

    The gradients themselves stay as they are: the optimiser multiplies by ``scale`` as it reads them.

    Parameters
    ----------
    parameters : ParameterStore

    Attributes
    ----------
    norm : Tensor, shape (1,)
        The norm that :meth:`measure` found, of the gradients without a loss scale.
    scale : Tensor, shape (1,)
        The factor; 1 at first.
    """

    def __init__(self, parameters: ParameterStore) -> None:
        self._parameters = parameters
        self.norm = Tensor(memory.zeros((1,), np.float32, scope="persistent"))
        self.scale = Tensor(memory.empty((1,), np.float32, scope="persistent"))
        self.release()

    def measure(self, max_norm: float, scaler: LossScaler | None = None) -> None:
        """Set ``norm`` to that of the gradients now, and ``scale`` to ``min(1, max_norm / norm)``.

        If ``scaler`` scaled the loss, ``scale`` also takes that out of the gradients, and the scaler hears of the norm.
        """
        gradients = self._parameters.gradients
        workspace = memory.empty((reduce.workspace_size(gradients.size),), np.float32, scope="workspace")
        reduce.norm(gradients, self.norm.array, workspace)
        if scaler is None:
            reduce.clip_scale(self.norm.array, self.scale.array, max_norm=max_norm)
        else:
            scaler.update(self.norm.array, self.scale.array, max_norm=max_norm)

    def release(self) -> None:
        """Set ``scale`` back to 1."""
        current_device().fill(self.scale.array, 1.0)
