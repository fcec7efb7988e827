"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019), in float32 whatever the model stores."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from numstack import memory
from numstack.errors import CheckpointError, ConfigError
from numstack.kernels import adamw as kernels
from numstack.nn.parameters import ParameterStore
from numstack.optim.clipping import GradientClipper
from numstack.optim.loss_scaler import LossScaler
from numstack.precision import LossScaling
from numstack.tensor import Tensor


class AdamW:
    """Updates all parameters of a store in one launch.

    Parameters
    ----------
    parameters : ParameterStore
    lr : float
        Learning rate of steps that are given none.
    betas : tuple of float
        Decay of the averages of the gradient and of its square.
    eps : float
        Added to the square root of the second.
    weight_decay : float
        Of matrices; biases and gains do not decay.
    loss_scaling : LossScaling, optional
        Scale losses, as ``model.precision.loss_scaling`` says; backward then starts from :meth:`loss_gradient`.

    Attributes
    ----------
    loss_scaler : LossScaler or None

    Raises
    ------
    ConfigError
        If a value cannot work.
    """

    def __init__(
        self,
        parameters: ParameterStore,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        loss_scaling: LossScaling | None = None,
    ) -> None:
        for name, value, valid in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps > 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not valid:
                raise ConfigError(
                    f"AdamW: {name}={value}; lr and weight_decay are at least 0, eps above 0, betas from 0 to below 1"
                )
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.loss_scaler = None if loss_scaling is None else LossScaler(loss_scaling)
        self._n_steps = 0
        self._parameters = parameters
        self._clipper = GradientClipper(parameters)
        self._clips = False
        self._m = memory.zeros((parameters.size,), np.float32, scope="persistent")
        self._v = memory.zeros((parameters.size,), np.float32, scope="persistent")
        decay_S = np.zeros(parameters.size // kernels.SEGMENT, np.float32)
        for parameter in parameters:
            start, stop = parameter.range
            decay_S[start // kernels.SEGMENT : stop // kernels.SEGMENT] = weight_decay if parameter.decays else 0.0
        self._decay_S = memory.from_host(decay_S, scope="persistent")

    @property
    def n_steps(self) -> int:
        """Steps taken so far. With loss scaling some are skipped: that waits for the device, which alone knows."""
        return self._n_steps if self.loss_scaler is None else self.loss_scaler.n_steps()[0]

    @property
    def gradient_norm(self) -> Tensor:
        """Global norm of the gradients of the last step that clipped or scaled, before clipping; shape (1,)."""
        return self._clipper.norm

    def loss_gradient(self, weight: float = 1.0) -> float | Tensor:
        """What ``backward`` is to start from: ``weight`` of this loss in the step's, times the loss scale if any."""
        return weight if self.loss_scaler is None else self.loss_scaler.gradient(weight)

    def step(self, *, lr: float | None = None, max_norm: float | None = None) -> None:
        """Update the parameters from their gradients. Does not wait for the device.

        Parameters
        ----------
        lr : float, optional
            Learning rate of this step.
        max_norm : float, optional
            Clip: scale the gradients down so that their global norm is at most this. If it is not finite, the
            parameters keep their values.

        Notes
        -----
        With loss scaling, a step whose gradients overflowed changes nothing but the scale, and does not count.
        """
        if max_norm is not None or self.loss_scaler is not None:
            self._clipper.measure(math.inf if max_norm is None else max_norm, self.loss_scaler)
        elif self._clips:
            self._clipper.release()
        self._clips = max_norm is not None
        self._n_steps += 1
        store = self._parameters
        kernels.step(
            store.values if store.rounded is None else store.rounded,
            store.gradients,
            self._m,
            self._v,
            self._decay_S,
            lr=self.lr if lr is None else lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            step=self._n_steps if self.loss_scaler is None else self.loss_scaler.n_taken_1,
            grad_scale_1=self._clipper.scale.array,
            master=None if store.rounded is None else store.values,
        )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies on the host: ``n_steps``, ``m.<name>`` and ``v.<name>`` of each parameter, and any loss scale."""
        state = {"n_steps": np.array([self.n_steps], np.int64)}
        for key, flat in (("m", self._m), ("v", self._v)):
            state |= {f"{key}.{name}": values for name, values in self._parameters.unpack(flat).items()}
        return state if self.loss_scaler is None else state | self.loss_scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on where :meth:`state_dict` was taken; with or without loss scaling, whatever it was taken with.

        Raises
        ------
        CheckpointError
            If names or shapes are not those of the parameters.
        """
        if "n_steps" not in state:
            raise CheckpointError("AdamW: the state has no n_steps; is it one of an optimiser?")
        for key, flat in (("m", self._m), ("v", self._v)):
            start = f"{key}."
            part = {name.removeprefix(start): values for name, values in state.items() if name.startswith(start)}
            self._parameters.pack(part, flat, f"AdamW: {key}")
        self._n_steps = int(state["n_steps"][0])
        if self.loss_scaler is not None:
            self.loss_scaler.load_state_dict(state, self._n_steps)
