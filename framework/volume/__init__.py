"""Folders and object stores behind one small interface: names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.volume.base import Entry as Entry
    from framework.volume.base import Volume as Volume
    from framework.volume.base import VolumeDenied as VolumeDenied
    from framework.volume.base import VolumeError as VolumeError
    from framework.volume.base import VolumeExists as VolumeExists
    from framework.volume.base import VolumeMissing as VolumeMissing
    from framework.volume.base import VolumeUnsupported as VolumeUnsupported
    from framework.volume.opening import open_volume as open_volume

_HOMES = {
    "Entry": "framework.volume.base",
    "Volume": "framework.volume.base",
    "VolumeDenied": "framework.volume.base",
    "VolumeError": "framework.volume.base",
    "VolumeExists": "framework.volume.base",
    "VolumeMissing": "framework.volume.base",
    "VolumeUnsupported": "framework.volume.base",
    "open_volume": "framework.volume.opening",
}

__all__ = [
    "Entry",
    "Volume",
    "VolumeDenied",
    "VolumeError",
    "VolumeExists",
    "VolumeMissing",
    "VolumeUnsupported",
    "open_volume",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework.volume' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
