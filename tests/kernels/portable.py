"""Which variants run on any device."""

from __future__ import annotations

import importlib
import pkgutil

import numstack.kernels
from numstack.kernels.variants import Variants


def portable_variants() -> set[str]:
    """Names of variants that are made for any device, and have none of what this file is about."""
    found: dict[str, bool] = {}
    for module in pkgutil.walk_packages(numstack.kernels.__path__, "numstack.kernels."):
        for table in vars(importlib.import_module(module.name)).values():
            for variant in table if isinstance(table, Variants) else ():
                found[variant.name] = found.get(variant.name, True) and variant.made_for == "any"
    return {name for name, is_portable in found.items() if is_portable}
