"""Training: the loop's step, and everything around it.

``train_step`` and ``evaluate`` do the work, ``Run`` resumes, reports, saves and stops, ``arguments`` reads the command
line. ``examples/train_gpt.py`` puts them together.
"""

from numstack.train.arguments import Arguments, parse
from numstack.train.options import Options
from numstack.train.run import Run
from numstack.train.step import evaluate, train_step
from numstack.train.stop import Stopped

__all__ = ["Arguments", "Options", "Run", "Stopped", "evaluate", "parse", "train_step"]
