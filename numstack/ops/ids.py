"""Integer ids (tokens, targets) on their way to the device."""

from __future__ import annotations

import numpy as np

from numstack import memory
from numstack.errors import DataError, DTypeError
from numstack.tensor import Tensor


def to_device(operation: str, name: str, ids: np.ndarray | Tensor, n_ids: int, ignored: int | None = None) -> Tensor:
    """Ids as an int32 tensor.

    Parameters
    ----------
    operation, name : str
        For messages.
    ids : array or Tensor of integers
        An array on the host is checked, then copied; a tensor is taken as checked when it was made.
    n_ids : int
        Ids must be at least 0 and below this.
    ignored : int, optional
        Allowed as well.

    Raises
    ------
    DataError
        If an id on the host is out of range; names the first one and its place.
    DTypeError
        If the ids are not integers, or a tensor's are not int32.
    """
    if isinstance(ids, Tensor):
        if ids.dtype != np.int32:
            raise DTypeError(f"{operation}: {name} is a {ids.dtype.name} tensor; expected int32")
        return ids
    ids = np.asarray(ids)
    if not np.issubdtype(ids.dtype, np.integer):
        raise DTypeError(f"{operation}: {name} has dtype {ids.dtype.name}; expected integers")
    wrong = (ids < 0) | (ids >= n_ids)
    if ignored is not None:
        wrong &= ids != ignored
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise DataError(
            f"{operation}: {name} holds {int(ids[place])} at {place}, but ids go from 0 to {n_ids - 1}; "
            "was the text encoded with another vocabulary?"
        )
    return Tensor(memory.send(ids.astype(np.int32, copy=False), scope="forward"))
