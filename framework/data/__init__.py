"""What the model eats, and in which order: names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.data.cache.local import LocalCache as LocalCache
    from framework.data.files.dataset import VolumeDataset as VolumeDataset
    from framework.data.images import ImageFolder as ImageFolder
    from framework.data.loader import DataLoader as DataLoader
    from framework.data.loader import EvalLoader as EvalLoader
    from framework.data.loader import to_device as to_device
    from framework.data.mix import Mix as Mix
    from framework.data.order import Order as Order
    from framework.data.position import Token as Token
    from framework.data.seeding import forked as forked
    from framework.data.shards.stream import ShardStream as ShardStream

_HOMES = {
    "DataLoader": "framework.data.loader",
    "EvalLoader": "framework.data.loader",
    "ImageFolder": "framework.data.images",
    "LocalCache": "framework.data.cache.local",
    "Mix": "framework.data.mix",
    "Order": "framework.data.order",
    "ShardStream": "framework.data.shards.stream",
    "Token": "framework.data.position",
    "VolumeDataset": "framework.data.files.dataset",
    "forked": "framework.data.seeding",
    "to_device": "framework.data.loader",
}

__all__ = [
    "DataLoader",
    "EvalLoader",
    "ImageFolder",
    "LocalCache",
    "Mix",
    "Order",
    "ShardStream",
    "Token",
    "VolumeDataset",
    "forked",
    "to_device",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
