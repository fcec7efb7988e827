"""The picture of a run: training and validation loss against steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def save_loss(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the losses in the rows of a metrics file to a PNG.

    Parameters
    ----------
    path : of the picture
    rows : objects with ``step`` and ``loss`` and, some of them, ``validation_loss``
    """
    # Imported here: matplotlib takes half a second, and only the end of a run needs it. Figure without pyplot keeps no
    # global state and needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for key, style in (("loss", {"lw": 1, "alpha": 0.7}), ("validation_loss", {"marker": "o", "ms": 4})):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=key.replace("_", " "), **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    FigureCanvasAgg(figure).print_figure(path)
