"""What of a run's checkpoints can be removed, and its removal: the logic of the command `gc`.

Guarantee: `garbage` changes nothing, and `collect` removes nothing that `garbage` would not list at that moment. The
same rules hold as for a run that deletes by itself: marks, the newest checkpoint and what a live attempt writes stay.
"""

from __future__ import annotations

import logging

from framework.checkpoint import removal
from framework.checkpoint.removal import Garbage
from framework.checkpoint.retention import Keep
from framework.checkpoint.store import CheckpointStore
from framework.errors import CheckpointError

log = logging.getLogger(__name__)


def garbage(store: CheckpointStore, keep: Keep | None = None, *, live_attempt: int | None = None) -> list[Garbage]:
    """What `collect` would remove.

    Args:
        store: The checkpoints of a run.
        keep: The rules of retention; none: only left-overs.
        live_attempt: The attempt that runs now; its files and those of later ones stay. None: no attempt runs.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    going = store.expendable(keep, live_attempt) if keep is not None else []
    checkpoints = [Garbage(one.path, removal.size_of(one.path), "checkpoint that no rule keeps") for one in going]
    folders = {one.path for one in checkpoints}
    return [*checkpoints, *(one for one in store.left_overs(live_attempt) if one.path.parent not in folders)]


def collect(store: CheckpointStore, keep: Keep | None = None, *, live_attempt: int | None = None) -> list[Garbage]:
    """Removes what `garbage` lists, as it is now.

    Returns:
        What was removed; what could not be is warned about.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    listed = garbage(store, keep, live_attempt=live_attempt)
    if keep is not None:
        try:
            store.retain(keep, attempt=live_attempt)
        except CheckpointError as error:
            log.warning("%s", error)
    if live_attempt is None:
        store.sweep(None)
    else:  # an empty folder may be one that the live attempt is about to write into: it stays
        for one in store.left_overs(live_attempt):
            removal.remove(one.path)
    return [one for one in listed if not one.path.exists() and not one.path.is_symlink()]
