"""A loader of streams, with the surface of the loader of map-style datasets.

Guarantee: the place that is saved is the one after what was trained, never after what was prefetched; from it the same
batches follow as without a break. Where a place cannot be kept or handed on, that is said or refused, never passed over
in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

OFFSET, SHARDS, STATEFUL, EPOCH, FAST_FORWARD = "offset", "shards", "stateful", "epoch", "fast-forward"
TELL_SECONDS = 10.0  # between two words on how far a fast-forward is

log = logging.getLogger(__name__)

Gather = Callable[[Any], list[Any]]
