"""NCCL's settings that numstack recommends, each with its reason: the one place where they are chosen.

They are environment variables, read when NCCL starts, so ``apply`` comes before that. Whatever the user has set stays.
They come before what NCCL's own configuration file (``nccl.conf``) says. ``numstack doctor`` prints ``report()``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from numstack.device.ranks import ranks_per_gpu


@dataclass(frozen=True, slots=True)
class Setting:
    """One recommended setting.

    Attributes
    ----------
    variable, value : str
        Of the environment.
    reason : str
        Why, in one line.
    shared_gpu : bool
        Only for ranks that share a GPU (``NUMSTACK_RANKS_PER_GPU`` above 1).
    """

    variable: str
    value: str
    reason: str
    shared_gpu: bool = False


SETTINGS = (
    Setting(
        "NCCL_NVLS_ENABLE",
        "0",
        "NVLink multicast takes part of a switch that all jobs of a machine share, and fails where they use it up or a "
        "virtual machine does not pass it on",
    ),
    Setting(
        "NCCL_RUNTIME_CONNECT",
        "0",
        "ranks are connected when the communicator is made, where waiting has a time-out, and not inside the first "
        "call of each kind, where a missing rank blocks the host",
    ),
    Setting("NCCL_MULTI_RANK_GPU_ENABLE", "1", "lets several ranks use one GPU, from NCCL 2.30 on", shared_gpu=True),
    Setting(
        "NCCL_MAX_CTAS", "8", "ranks on one GPU take turns; small kernels make the turns short", shared_gpu=True
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SettingState:
    """A setting and what becomes of it here; ``obeyed`` is False only where the user has chosen another value."""

    setting: Setting
    state: str
    obeyed: bool


def apply() -> None:
    """Set what applies to this run and the user has not set. Call it before NCCL starts."""
    for setting in SETTINGS:
        if not setting.shared_gpu or ranks_per_gpu() > 1:
            os.environ.setdefault(setting.variable, setting.value)


def report() -> list[SettingState]:
    """Every setting with its state: in force, replaced by the user, or not needed."""
    states = []
    for setting in SETTINGS:
        found = os.environ.get(setting.variable, setting.value)
        if found != setting.value:
            states.append(SettingState(setting, f"set to {found} by you", obeyed=False))
        elif setting.shared_gpu and ranks_per_gpu() == 1:
            states.append(SettingState(setting, "only when ranks share a GPU", obeyed=True))
        else:
            states.append(SettingState(setting, "in force", obeyed=True))
    return states
