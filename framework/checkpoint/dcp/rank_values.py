"""Values of which every rank has its own.

Guarantee: torch keeps one value per key and silently drops the others; what `per_rank` wraps has a key of its own on
each rank, so none is lost, and each rank gets back the value that the rank of its number saved. A rank that has none
in a checkpoint gets an error, never another rank's value or its own from before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from framework.errors import CheckpointError

_KEY = re.compile(r"(?P<key>.*?)\.@rank_(?P<rank>\d+)(\..*)?")


class PerRank(dict[str, Any]):
    """This rank's own value in a state dict, made by `per_rank`. It has one key, which carries the rank."""

    @property
    def value(self) -> Any:
        """This rank's value: the one given, or after a load the one read."""
        (value,) = self.values()
        return value


def per_rank(value: Any) -> PerRank:
    """Wraps a value of which every rank has its own, for a state dict given to `dcp.save` and `dcp.load`.

        state = {"model": ..., "rng": per_rank(torch.get_rng_state())}
        dcp.load(state, storage_reader=VolumeReader(path))
        torch.set_rng_state(state["rng"].value)

    A load with fewer ranks leaves the further values unread. With more ranks it fails, naming the key: leave the key
    out there and make the value anew. Make it after `init_process_group`: a save or load of several ranks without it is
    refused.

    Args:
        value: A tensor, or what `torch.load(weights_only=True)` reads; `random.getstate()` and
            `numpy.random.get_state()` too.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return PerRank({f"@rank_{rank}": value})


def is_of_rank(key: str) -> bool:
    """Whether a joined key is of a value that each rank has for itself."""
    return _KEY.fullmatch(key) is not None


def refuse_ungrouped(what: str, consequence: str) -> None:
    """Refuses what several ranks would do without knowing of each other.

    Args:
        what: What is about to be done, for the message.
        consequence: What would come of it.

    Raises:
        CheckpointError: `WORLD_SIZE` says that there are several ranks, and torch.distributed is not initialised.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if dist.is_available() and dist.is_initialized():
        return
    if size.isdecimal() and int(size) > 1:
        raise CheckpointError(
            f"{what}: WORLD_SIZE={size}, but torch.distributed is not initialised, so {consequence}. Call "
            f"torch.distributed.init_process_group first."
        )


class SavedKeys(dict[str, Any]):
    """What a checkpoint describes, by key; asking it for the value of a rank that saved none is an error.

    torch asks here before it reads anything, and would say only that a key is missing, or with
    `allow_partial_load` leave the value as it was.

    Args:
        described: The entries by key.
        place: The checkpoint, for the message.
    """

    def __init__(self, described: Mapping[str, Any], place: str) -> None:
        super().__init__(described)
        self._place = place

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if isinstance(key, str) and (match := _KEY.fullmatch(key)):
            name = match["key"]
            ranks = {int(found["rank"]) for other in self if (found := _KEY.fullmatch(other)) and found["key"] == name}
            if ranks and int(match["rank"]) not in ranks:
                raise CheckpointError(
                    f"{self._place} has '{name}' of {len(ranks)} ranks, each its own, and none of rank "
                    f"{match['rank']}. Leave '{name}' out of what is loaded on that rank and make it anew, or load "
                    f"with as many ranks as saved it."
                )
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
