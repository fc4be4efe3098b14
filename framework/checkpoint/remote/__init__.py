"""The second home of checkpoints: a volume that other hosts see. Names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.checkpoint.remote.listing import Copy as Copy
    from framework.checkpoint.remote.tier import RemoteTier as RemoteTier
    from framework.checkpoint.remote.tiers import Candidate as Candidate
    from framework.checkpoint.remote.tiers import merge as merge

_HOMES = {
    "Candidate": "framework.checkpoint.remote.tiers",
    "Copy": "framework.checkpoint.remote.listing",
    "RemoteTier": "framework.checkpoint.remote.tier",
    "merge": "framework.checkpoint.remote.tiers",
}

__all__ = ["Candidate", "Copy", "RemoteTier", "merge"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework.checkpoint.remote' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
