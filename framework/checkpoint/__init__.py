"""Checkpoints that are either whole and proven, or not there: names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.checkpoint.content import SaveHeader as SaveHeader
    from framework.checkpoint.content import SaveResult as SaveResult
    from framework.checkpoint.content import TrainState as TrainState
    from framework.checkpoint.dcp.rank_values import per_rank as per_rank
    from framework.checkpoint.dcp.reader import VolumeReader as VolumeReader
    from framework.checkpoint.dcp.writer import VolumeWriter as VolumeWriter
    from framework.checkpoint.manifest import Manifest as Manifest
    from framework.checkpoint.reader import CheckpointReader as CheckpointReader
    from framework.checkpoint.store import CheckpointStore as CheckpointStore
    from framework.checkpoint.store import Found as Found
    from framework.checkpoint.writer import CheckpointWriter as CheckpointWriter

_HOMES = {
    "CheckpointReader": "framework.checkpoint.reader",
    "CheckpointStore": "framework.checkpoint.store",
    "CheckpointWriter": "framework.checkpoint.writer",
    "Found": "framework.checkpoint.store",
    "Manifest": "framework.checkpoint.manifest",
    "SaveHeader": "framework.checkpoint.content",
    "SaveResult": "framework.checkpoint.content",
    "TrainState": "framework.checkpoint.content",
    "VolumeReader": "framework.checkpoint.dcp.reader",
    "VolumeWriter": "framework.checkpoint.dcp.writer",
    "per_rank": "framework.checkpoint.dcp.rank_values",
}

__all__ = [
    "CheckpointReader",
    "CheckpointStore",
    "CheckpointWriter",
    "Found",
    "Manifest",
    "SaveHeader",
    "SaveResult",
    "TrainState",
    "VolumeReader",
    "VolumeWriter",
    "per_rank",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
