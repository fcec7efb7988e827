"""Optimisers, learning-rate schedules and gradient clipping."""

from numstack.optim import schedules
from numstack.optim.adamw import AdamW
from numstack.optim.clipping import GradientClipper

__all__ = ["AdamW", "GradientClipper", "schedules"]
