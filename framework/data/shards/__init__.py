"""Shards as a stream of samples (tar, parquet, lines of text): names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.data.shards.stream import ShardStream as ShardStream

_HOMES = {"ShardStream": "framework.data.shards.stream"}

__all__ = ["ShardStream"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework.data.shards' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
