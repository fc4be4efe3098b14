"""A fault-tolerant training-loop framework for PyTorch: names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.callback import Callback as Callback
    from framework.data.loader import DataLoader as DataLoader
    from framework.progress import Progress as Progress
    from framework.recipe import Recipe as Recipe
    from framework.recipe import StepOutput as StepOutput
    from framework.trainer import Trainer as Trainer

_HOMES = {
    "Callback": "framework.callback",
    "DataLoader": "framework.data.loader",
    "Progress": "framework.progress",
    "Recipe": "framework.recipe",
    "StepOutput": "framework.recipe",
    "Trainer": "framework.trainer",
}

__all__ = ["Callback", "DataLoader", "Progress", "Recipe", "StepOutput", "Trainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
