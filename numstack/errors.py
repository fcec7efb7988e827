"""Every error that numstack raises on purpose.

A message is one sentence or two: what was given, what was expected, and what to do about it.
"""


class NumstackError(Exception):
    """Base of all errors raised on purpose; the command line prints it as one line, without a traceback."""


class ShapeError(NumstackError, ValueError):
    """Sizes of arrays do not fit one another."""


class DTypeError(NumstackError, TypeError):
    """An array has a dtype or a memory layout that the operation does not take."""


class ConfigError(NumstackError, ValueError):
    """An option has a value that cannot work, or two options contradict each other."""


class DeviceError(NumstackError, RuntimeError):
    """The device, its driver or a launch failed."""


class KernelError(NumstackError):
    """A kernel cannot be compiled for the device, or broke a rule while it was being checked."""


class OutOfMemory(NumstackError, MemoryError):
    """The device is full; the message holds a table of the largest holders."""


class CommError(NumstackError, RuntimeError):
    """Ranks disagree, or one of them is gone."""


class DataError(NumstackError, ValueError):
    """A data file or a token in it is unusable."""


class CheckpointError(NumstackError, RuntimeError):
    """A checkpoint is missing, damaged, or of another run."""
