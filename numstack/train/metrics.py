"""What a run measured, as JSON lines: an object for each training step, and one for each validation.

All have ``step`` and ``elapsed_s``, the time spent in training so far (over all parts of a run that was resumed). Steps
have ``loss``, the mean over all ranks in nats per token, and ``tokens_per_s``; validations have ``validation_loss`` in
nats per token and ``validation_nats_per_character``, and with loss scaling ``loss_scale`` and ``n_skipped_steps``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from numstack.errors import DataError


class MetricsFile:
    """Appends lines to a file; each line is complete once ``write`` returns.

    Parameters
    ----------
    path : created if missing
    step : int
        Lines of later steps are dropped: a resumed run makes them again.
    """

    def __init__(self, path: Path, *, step: int = 0) -> None:
        kept = [row for row in read(path) if row["step"] <= step]
        self.rows = kept
        temporary = path.with_name(f".{path.name}")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, path)
        self._file = path.open("a", buffering=1)

    def write(self, **row: Any) -> None:
        """Append one object; ``step`` is needed, the rest is free."""
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; none if there is no file. A last line that a kill cut short is left out."""
    if not path.exists():
        return []
    rows = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise DataError(f"{path}: line {number} is no JSON; move the file away") from None
    return rows
