"""What the tests of remote checkpoints share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint_support import SOLO, assert_finds, make_writer, save_and_close, small_state, solo_group

from framework.checkpoint import CheckpointReader, CheckpointStore, SaveHeader, SaveResult
from framework.checkpoint.remote import RemoteTier
from framework.distributed import Group
from framework.volume import Volume, open_volume

RETRY_SECONDS = 2.0


def open_remote(place: str | Path, retry_seconds: float = RETRY_SECONDS) -> Volume:
    return open_volume(str(place), retry_seconds=retry_seconds).at("a-run")


def make_tier(
    place: str | Path | Volume, store: CheckpointStore, *, attempt: int = 1, group: Group | None = None, **options: Any
) -> RemoteTier:
    """The tier of an attempt that has begun to train."""
    volume = place if isinstance(place, Volume) else open_remote(place)
    tier = RemoteTier(
        volume, group or solo_group(), store=store, run="a-run", attempt=attempt, token=f"token-{attempt}", **options
    )
    tier.claim()
    return tier


def save_remotely(tier: RemoteTier, step: int, header: SaveHeader | None = None, **options: Any) -> SaveResult:
    """Saves `small_state(step)` with a writer of its own; the result says how it went."""
    options = {"world": tier.world, "group": tier.group, "attempt": tier.attempt, **options}
    return save_and_close(make_writer(tier.store, remote=tier, **options), step, header)


def remote_reader(tier: RemoteTier) -> CheckpointReader:
    return CheckpointReader(tier.store, tier.world, tier.group, remote=tier)


def assert_resumes(tier: RemoteTier, step: int) -> CheckpointReader:
    """A restart with this tier finds the checkpoint of a step, bit for bit."""
    reader = remote_reader(tier)
    assert_finds(reader, step)
    return reader


def names(place: str | Path | Volume) -> set[str]:
    volume = place if isinstance(place, Volume) else open_remote(place)
    return {entry.name for entry in volume.list()}


__all__ = [
    "SOLO", "assert_resumes", "make_tier", "names", "open_remote", "remote_reader", "save_remotely", "small_state",
]  # fmt: skip
