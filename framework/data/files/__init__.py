"""Files of a mounted path or a URL as samples: names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.data.files.dataset import VolumeDataset as VolumeDataset
    from framework.data.files.manifest import Manifest as Manifest
    from framework.data.files.paths import PathSamples as PathSamples
    from framework.data.files.paths import find_volume as find_volume
    from framework.data.files.paths import with_index as with_index
    from framework.data.files.stream import PathStream as PathStream

_HOMES = {
    "Manifest": "framework.data.files.manifest",
    "PathSamples": "framework.data.files.paths",
    "PathStream": "framework.data.files.stream",
    "VolumeDataset": "framework.data.files.dataset",
    "find_volume": "framework.data.files.paths",
    "with_index": "framework.data.files.paths",
}

__all__ = ["Manifest", "PathSamples", "PathStream", "VolumeDataset", "find_volume", "with_index"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework.data.files' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
