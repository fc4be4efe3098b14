"""Files of a mounted path or a URL as samples: names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.data.files.dataset import VolumeDataset as VolumeDataset
    from framework.data.files.manifest import Manifest as Manifest

_HOMES = {
    "Manifest": "framework.data.files.manifest",
    "VolumeDataset": "framework.data.files.dataset",
}

__all__ = ["Manifest", "VolumeDataset"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework.data.files' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
