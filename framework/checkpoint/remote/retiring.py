"""How checkpoints leave where there are two tiers.

Guarantee: the rules count remote checkpoints. `.metadata` goes first, so that no half of one is ever listed; nothing goes
while the newest is damaged, and never the last good one; the claim is looked at before each deletion. A local copy goes
when its upload is published and enough newer ones are here, or when no rule keeps it and something newer is published.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from framework.checkpoint.manifest import METADATA
from framework.checkpoint.remote.listing import MARK, Copy, Folder
from framework.checkpoint.remote.tiers import merge
from framework.checkpoint.retention import Keep, expendable, is_good
from framework.checkpoint.store import Found

if TYPE_CHECKING:
    from framework.checkpoint.remote.tier import RemoteTier

log = logging.getLogger(__name__)


def retire(tier: RemoteTier, keep: Keep) -> list[str]:
    """Deletes what no rule keeps, in both tiers.

    Args:
        tier: The remote tier, on rank 0.
        keep: The rules.

    Returns:
        The places of what was deleted.

    Raises:
        CheckpointError: Another attempt claimed the place, or the run directory.
        VolumeError: The place cannot be read, or something could not be deleted.
    """
    tier.check_claim()
    folders = tier.listing.folders()
    copies = [tier.listing.look(folder) for folder in folders if folder.is_published]
    if copies and copies[0].header is None:
        log.warning("nothing is deleted: the newest checkpoint, %s, is damaged: %s", copies[0].place, copies[0].damage)
        return []
    protected = tier.store.marks.protected([copy.header.attempt for copy in copies if copy.header is not None])
    gone = {found.step for found in expendable([_found(copy) for copy in copies], keep, protected=protected)}
    deleted = []
    for folder in folders:
        if folder.step in gone:
            tier.check_claim()
            tier.volume.delete(f"{folder.name}/{METADATA}")
            tier.volume.delete_folder(folder.name)
            deleted.append(tier.volume.shown(folder.name))
    kept = [copy for copy in copies if copy.step not in gone]
    _sweep(tier, folders, kept)
    return deleted + _retire_local(tier, keep, kept, protected)


def _sweep(tier: RemoteTier, folders: Sequence[Folder], kept: Sequence[Copy]) -> None:
    """Removes what uploads that were never published left: whole folders older than the newest, and single files."""
    good = {copy.step: copy for copy in kept if copy.header is not None}
    newest = max(good, default=-1)
    waiting = tier.pending.step if tier.pending is not None else None
    for folder in folders:
        if folder.step == waiting:
            continue
        if not folder.is_published and folder.step < newest:
            tier.volume.delete_folder(folder.name)
        elif folder.is_published and (copy := good.get(folder.step)) is not None:
            used = {METADATA, MARK, copy.manifest_name, *copy.manifest.files}
            for name in folder.entries.keys() - used:
                tier.volume.delete(f"{folder.name}/{name}")


def _retire_local(tier: RemoteTier, keep: Keep, kept: Sequence[Copy], protected: Collection[int]) -> list[str]:
    good = {copy.step: copy for copy in kept if copy.header is not None}
    merged = merge(tier.store.list(), [*good.values()])
    here = [one for one in merged if one.local is not None and is_good(one.local)]
    uploaded = [one for one in here if one.is_same]
    allowed = len(uploaded) if tier.keep_local is None else tier.keep_local
    newest = max(good, default=-1)
    everything = [one.local if one.local is not None else _found(good[one.step]) for one in merged]
    unwanted = {found.step for found in expendable(everything, keep, protected=protected)}
    surplus = uploaded[allowed:] + [
        one for one in here if not one.is_same and one.step in unwanted and one.step < newest
    ]
    deleted = []
    for one in surplus:
        assert one.local is not None
        is_free = one.step not in protected and not one.local.path.is_symlink()
        if is_free and tier.store.delete(one.local, tier.is_owner):
            deleted.append(str(one.local.path))
    return deleted


def _found(copy: Copy) -> Found:
    """A remote copy as the rules of retention see it."""
    return Found(Path(copy.place), copy.step, header=copy.header, damage=copy.damage)
