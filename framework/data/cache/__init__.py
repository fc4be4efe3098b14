"""A cache of a volume's files on the local disk: names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.data.cache.local import LocalCache as LocalCache
    from framework.data.cache.local import open_cache as open_cache
    from framework.data.cache.space import Admission as Admission
    from framework.data.cache.space import CacheSpace as CacheSpace
    from framework.data.cache.transit import TransitArea as TransitArea

_HOMES = {
    "Admission": "framework.data.cache.space",
    "CacheSpace": "framework.data.cache.space",
    "LocalCache": "framework.data.cache.local",
    "TransitArea": "framework.data.cache.transit",
    "open_cache": "framework.data.cache.local",
}

__all__ = ["Admission", "CacheSpace", "LocalCache", "TransitArea", "open_cache"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework.data.cache' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
