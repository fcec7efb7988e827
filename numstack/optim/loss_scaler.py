"""Dynamic loss scaling: the state of it, which lives on the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from numstack import memory
from numstack.device import Array, current_device
from numstack.kernels import elementwise
from numstack.kernels import loss_scale as kernels
from numstack.precision import LARGEST_SCALE, SMALLEST_SCALE, LossScaling
from numstack.tensor import Tensor

_SCALE, _GOOD, _SKIPPED = "loss_scale.scale", "loss_scale.n_good", "loss_scale.n_skipped"


class LossScaler:
    """Scales a loss, notices on the device when that made gradients overflow, and adapts.

    Parameters
    ----------
    options : LossScaling

    Attributes
    ----------
    scale : Tensor, shape (1,), float32
        Of the next loss.
    n_taken_1 : array, shape (1,), int32
        Steps taken, on the device, which alone knows.
    """

    def __init__(self, options: LossScaling) -> None:
        self._options = options
        self.scale = Tensor(memory.from_host(np.array([options.initial], np.float32), scope="persistent"))
        self._counts_3 = memory.zeros((3,), np.int32, scope="persistent")
        self.n_taken_1: Array = self._counts_3[kernels.TAKEN : kernels.TAKEN + 1]

    def gradient(self, weight: float) -> Tensor:
        """``weight`` times the scale: the gradient that backward starts from instead of ``weight``."""
        seed = memory.empty((1,), np.float32, scope="backward")
        elementwise.scale(self.scale.array, seed, weight)
        return Tensor(seed)

    def update(self, norm_1: Array, grad_scale_1: Array, *, max_norm: float) -> None:
        """Decide whether the step with gradients of this norm counts: ``numstack.kernels.loss_scale.update``."""
        kernels.update(
            norm_1,
            self.scale.array,
            self._counts_3,
            grad_scale_1,
            max_norm=max_norm,
            growth=self._options.growth,
            backoff=self._options.backoff,
            window=self._options.window,
            smallest=SMALLEST_SCALE,
            largest=LARGEST_SCALE,
        )

    def n_steps(self) -> tuple[int, int]:
        """How many steps were taken and skipped; waits for the device."""
        counts = memory.to_host(self._counts_3)
        return int(counts[kernels.TAKEN]), int(counts[kernels.SKIPPED])

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies on the host; the count of steps taken is the optimiser's."""
        counts = memory.to_host(self._counts_3).astype(np.int64)
        return {
            _SCALE: self.scale.numpy(),
            _GOOD: counts[kernels.GOOD : kernels.GOOD + 1],
            _SKIPPED: counts[kernels.SKIPPED : kernels.SKIPPED + 1],
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray], n_taken: int) -> None:
        """Go on where :meth:`state_dict` was taken, or start scaling after ``n_taken`` steps that had none."""
        scale = np.asarray(state.get(_SCALE, [self._options.initial]), np.float32)
        counts = np.zeros(3, np.int32)
        counts[kernels.GOOD] = int(state[_GOOD][0]) if _GOOD in state else 0
        counts[kernels.SKIPPED] = int(state[_SKIPPED][0]) if _SKIPPED in state else 0
        counts[kernels.TAKEN] = n_taken
        device = current_device()
        device.copy(self.scale.array, scale)
        device.copy(self._counts_3, counts)
        device.synchronize()
