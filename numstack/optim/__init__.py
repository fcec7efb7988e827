"""Optimisers, learning-rate schedules, gradient clipping and loss scaling."""

from numstack.optim import schedules
from numstack.optim.adamw import AdamW
from numstack.optim.clipping import GradientClipper
from numstack.optim.loss_scaler import LossScaler

__all__ = ["AdamW", "GradientClipper", "LossScaler", "schedules"]
