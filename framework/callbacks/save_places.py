"""Where checkpoints lie, and what loss they survive.

Guarantee: one message when training begins. Where every host would keep its own part of a checkpoint and nothing else
is kept, the run is refused before its first step unless the config permits it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from framework.checkpoint.remote.homes import find_homes
from framework.errors import CheckpointError
from framework.mounts import mount_of

if TYPE_CHECKING:
    from framework.checkpoint.remote.tier import RemoteTier
    from framework.distributed import Group, World
    from framework.trainer import Trainer

log = logging.getLogger(__name__)

PERMISSION = "local_checkpoints"
MEMORY = ("tmpfs", "ramfs", "devtmpfs")
CONTAINER = ("overlay", "aufs")
NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "beegfs", "wekafs", "afs", "9p", "virtiofs",
    "pvfs2", "panfs", "glusterfs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A folder for checkpoints.

    Args:
        path: The folder.
        mount: Its mount, in words: kind, source and mount point.
    """

    path: Path
    mount: str

    @classmethod
    def of(cls, path: Path) -> Place:
        """The place of a folder that exists or will."""
        try:
            return cls(path, mount_of(path))
        except OSError as error:
            return cls(path, f"unknown: {error.strerror or error}")

    @property
    def kind(self) -> str:
        return self.mount.split(" ", 1)[0]

    @property
    def is_node_local(self) -> bool:
        """Whether it is gone with its host, as far as the kind of mount tells."""
        return self.kind not in NETWORK and not self.kind.startswith("fuse")

    @property
    def survives(self) -> str:
        """What losses checkpoints here survive, and which they do not."""
        if self.kind in MEMORY:
            return "memory of this host: they survive the end of the process, not a restart of the host"
        if self.kind in CONTAINER:
            return "inside a container: they survive the end of the process, not the end of the container"
        if self.is_node_local:
            return "a disk of this host: they survive a restart of the host, not its loss"
        return "not on a disk of this host: they survive its loss"


def tell(trainer: Trainer, group: Group, remote: RemoteTier | None) -> None:
    """Says where checkpoints lie and what they survive. A collective.

    Args:
        trainer: When training begins.
        group: All ranks; nothing else uses it now.
        remote: Where all hosts see them, if checkpoints are sent anywhere.

    Raises:
        CheckpointError: Several hosts would each keep their own part, and nothing is kept elsewhere.
    """
    place = Place.of(trainer.run.checkpoints)
    if remote is not None:
        if trainer.world.is_main:
            _tell_both(place, remote)
        return
    is_split = spans_hosts(trainer.world) and not find_homes(group, place.path).is_shared
    if is_split and not trainer.allows(PERMISSION):
        raise CheckpointError(
            f"The hosts of this run do not see the same {place.path} (here it is on {place.mount}): each would keep its "
            f"own part of a checkpoint, and none could be resumed from. Put run.root on a file system that all hosts "
            f"share, or give callbacks.async_checkpoint.remote. If they do share it and are slow to show new files, "
            f"permit it with run.allow=[{PERMISSION}]."
        )
    if not trainer.world.is_main:
        return
    level = logging.WARNING if place.is_node_local or is_split else logging.INFO
    log.log(level, "checkpoints: %s (%s), %s", place.path, place.mount, place.survives)


def _tell_both(place: Place, remote: RemoteTier) -> None:
    where = remote.volume.path
    if where is None:
        log.info("checkpoints: %s, and %s, which survives the loss of hosts", place.path, remote.volume.place)
        return
    other = Place.of(where)
    level = logging.WARNING if other.is_node_local else logging.INFO
    log.log(level, "checkpoints: %s, and %s (%s), %s", place.path, where, other.mount, other.survives)


def spans_hosts(world: World) -> bool:
    """Whether the ranks run on more than one host."""
    return world.size > world.local_size
