"""Where else a run keeps its checkpoints, and how that place is reached.

Guarantee: a place that cannot be read or written is an error before the first step, with URL and cause; it is never
taken for an empty one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from framework.checkpoint import CheckpointStore, Manifest
from framework.checkpoint.remote.listing import Listing
from framework.checkpoint.remote.tier import RemoteTier
from framework.distributed import Group
from framework.errors import CheckpointError, ConfigError, suggest
from framework.volume import Volume, VolumeError, open_volume
from framework.volume.opening import meant_by

if TYPE_CHECKING:
    from framework.trainer import Trainer

MAX_RETRY_SECONDS = 120.0
SCHEMES = ("file", "s3", "gs", "az", "memory")  # those that can be written to


def parse_place(place: object, *, key: str) -> str | None:
    """A path or URL as the config has it, as far as that can be told without connecting to it; none for none.

    Raises:
        ConfigError: It is neither, or a URL that cannot be written to; the message names key and value.
    """
    if place is None:
        return None
    given = f"{key}={place!r}"
    if not isinstance(place, str) or not place.strip():
        raise ConfigError(f"{given} is no place. Give a folder or a URL such as s3://bucket/runs, or null.")
    if meant := meant_by(place):
        raise ConfigError(f"{given} is no URL. Did you mean {meant}? A folder of that name is ./{place}.")
    scheme, separator, _ = place.partition("://")
    if separator and scheme.lower() not in SCHEMES:
        raise ConfigError(
            f"{given} cannot be written to.{suggest(scheme.lower(), SCHEMES)} "
            f"Give a folder, or a URL of {', '.join(SCHEMES)}."
        )
    return place


def open_place(place: str, name: str, timeout_seconds: float) -> Volume:
    """The place of one run, `<place>/<name>`.

    Args:
        place: A path or URL.
        name: Name of the run.
        timeout_seconds: Of a save; a fourth of it, at most two minutes, is how long an outage is waited out.

    Raises:
        VolumeError: It names no place.
    """
    return open_volume(place, retry_seconds=min(MAX_RETRY_SECONDS, timeout_seconds / 4)).at(name)


def remote_store(
    trainer: Trainer,
    place: str,
    *,
    group: Group,
    store: CheckpointStore,
    keep_local: int | None,
    timeout_seconds: float,
) -> RemoteTier:
    """The remote tier of a run, proven to work, and noted as `trainer.remote` for the restart. A collective.

    Args:
        trainer: In `setup`: its run directory is taken.
        place: `<place>/<run.name>` gets the checkpoints.
        group: The group of the writer.
        store: The local checkpoints.
        keep_local: How many uploaded ones keep their local copy; none: as many as are kept remotely.
        timeout_seconds: Of a save.

    Raises:
        CheckpointError: The place cannot be written or read; the message names URL and cause.
    """
    lease = trainer.lease
    where = open_place(place, trainer.name, timeout_seconds)
    _check_apart(where, place, trainer)
    tier = RemoteTier(
        where, group, store=store, run=trainer.name, attempt=trainer.attempt,
        token=trainer.token, keep_local=keep_local, is_owner=lease.is_held if lease is not None else lambda: True,
    )  # fmt: skip
    tier.probe()
    trainer.remote = tier
    return tier


def _check_apart(where: Volume, place: str, trainer: Trainer) -> None:
    """Refuses a place in the run directory, or around it: each would take the files of the other for its own."""
    if where.path is None:
        return
    far, near = where.path.resolve(), trainer.run.path.resolve()
    if far.is_relative_to(near) or near.is_relative_to(far):
        raise ConfigError(
            f"callbacks.async_checkpoint.remote={place} would put the copies into {where.path}, and the run directory "
            f"is {trainer.run.path}: one lies in the other. Give a place outside run.root and run.dir."
        )


def newest(trainer: Trainer) -> Manifest | None:
    """What the newest good checkpoint of this run in its other place says; none without one. Touches nothing.

    Raises:
        CheckpointError: The place cannot be read; the message names URL and cause.
    """
    for callback in trainer.callbacks.values():
        place, timeout = getattr(callback, "remote", None), getattr(callback, "timeout_seconds", None)
        if isinstance(place, str) and isinstance(timeout, (int, float)):
            return _newest_in(trainer, place, timeout)
    return None


def _newest_in(trainer: Trainer, place: str, timeout_seconds: float) -> Manifest | None:
    try:
        where = open_place(place, trainer.name, timeout_seconds)
        _check_apart(where, place, trainer)
        listing = Listing(where)
        copies = (listing.look(folder) for folder in listing.folders() if folder.is_published)
        return next((copy.header for copy in copies if copy.header is not None), None)
    except VolumeError as error:
        raise CheckpointError(f"Whether there is a checkpoint to resume in {place} is not known: {error}") from error
