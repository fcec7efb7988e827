"""``numstack doctor``: one page on whether this machine is fit to train, and what to do where it is not."""

from numstack.doctor.command import main
from numstack.doctor.diagnosis import Line, Status, diagnose
from numstack.doctor.facts import Facts, gather

__all__ = ["Facts", "Line", "Status", "diagnose", "gather", "main"]
