"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from numstack import memory
from numstack.errors import CheckpointError, ConfigError
from numstack.kernels import adamw as kernels
from numstack.nn.parameters import ParameterStore
from numstack.optim.clipping import GradientClipper
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

    Attributes
    ----------
    n_steps : int
        Steps taken so far.

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
        self.n_steps = 0
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
    def gradient_norm(self) -> Tensor:
        """Global norm of the gradients of the last step that clipped, before clipping; shape (1,)."""
        return self._clipper.norm

    def step(self, *, lr: float | None = None, max_norm: float | None = None) -> None:
        """Update the parameters from their gradients. Does not wait for the device.

        Parameters
        ----------
        lr : float, optional
            Learning rate of this step.
        max_norm : float, optional
            Clip: scale the gradients down so that their global norm is at most this. If it is not finite, the
            parameters keep their values.
        """
        if max_norm is not None:
            self._clipper.measure(max_norm)
        elif self._clips:
            self._clipper.release()
        self._clips = max_norm is not None
        self.n_steps += 1
        kernels.step(
            self._parameters.values,
            self._parameters.gradients,
            self._m,
            self._v,
            self._decay_S,
            lr=self.lr if lr is None else lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            step=self.n_steps,
            grad_scale_1=self._clipper.scale.array,
        )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies on the host: ``n_steps``, and ``m.<name>`` and ``v.<name>`` of each parameter."""
        state = {"n_steps": np.array([self.n_steps], np.int64)}
        for key, flat in (("m", self._m), ("v", self._v)):
            state |= {f"{key}.{name}": values for name, values in self._parameters.unpack(flat).items()}
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on where :meth:`state_dict` was taken.

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
        self.n_steps = int(state["n_steps"][0])
