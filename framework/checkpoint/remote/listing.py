"""The checkpoints in a remote place, and what they say about themselves.

Guarantee: a copy is listed when its `.metadata` is there. One whose manifest, or the size of any of whose files, is not
what was published is listed as damaged, with the reason; so is one that a reader marked as damaged.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from framework.checkpoint import files
from framework.checkpoint.files import DamagedError
from framework.checkpoint.manifest import METADATA, Manifest, unseal
from framework.errors import CheckpointError
from framework.volume import Entry, Volume, VolumeMissing

MARK = "damaged.txt"  # what a reader that found damage leaves beside the files, with the reason
_STEP = re.compile(r"step_(\d{10,})")


@dataclass(frozen=True, slots=True)
class Copy:
    """A published checkpoint in a remote place.

    Args:
        step: Completed optimizer steps, from the folder's name.
        place: Its URL, for messages.
        metadata: The bytes of `.metadata`.
        manifest_name: Name of its manifest; empty if that is not known.
        manifest_data: The bytes of the manifest.
        header: The manifest; none if the copy is damaged.
        damage: What is wrong with it, as far as this was looked at; none if nothing is.
    """

    step: int
    place: str
    metadata: bytes = b""
    manifest_name: str = ""
    manifest_data: bytes = b""
    header: Manifest | None = None
    damage: str | None = None

    @property
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            CheckpointError: The copy is damaged.
        """
        if self.header is None:
            raise CheckpointError(f"{self.place} is damaged: {self.damage}. Use an older checkpoint.")
        return self.header


@dataclass(frozen=True, slots=True)
class Folder:
    """What lies in the remote folder of a step, by file name."""

    step: int
    name: str
    entries: Mapping[str, Entry]

    @property
    def is_published(self) -> bool:
        return METADATA in self.entries


@dataclass(slots=True)
class Listing:
    """Lists a remote place; remembers what it has read of checkpoints that do not change, as long as they are there.

    Args:
        volume: The place of one run.
    """

    volume: Volume
    _known: dict[tuple[str, int, float], Copy] = field(default_factory=dict)

    def folders(self) -> list[Folder]:
        """The folders of steps, published or not, newest first.

        Raises:
            VolumeError: The place cannot be listed.
        """
        found: dict[str, dict[str, Entry]] = defaultdict(dict)
        for entry in self.volume.list():
            folder, _, name = entry.name.partition("/")
            if name and _STEP.fullmatch(folder):
                found[folder][name] = entry
        folders = [Folder(int(name.removeprefix("step_")), name, entries) for name, entries in found.items()]
        there = {_key(folder) for folder in folders if folder.is_published}
        self._known = {key: copy for key, copy in self._known.items() if key in there}
        return sorted(folders, key=lambda one: one.step, reverse=True)

    def copies(self) -> list[Copy]:
        """The published checkpoints, newest first.

        Raises:
            VolumeError: The place cannot be read.
            CheckpointError: One was written by a later version.
        """
        return [self.look(folder) for folder in self.folders() if folder.is_published]

    def look(self, folder: Folder) -> Copy:
        """One checkpoint, judged by its manifest and the sizes of its files."""
        key = _key(folder)
        copy = self._known.get(key)
        if copy is None:
            copy = _read(self.volume, folder)
            if copy.header is not None:
                self._known[key] = copy
        damage = copy.damage or _wrong_size(copy, folder)
        if damage is None and MARK in folder.entries:
            damage = self.volume.read(f"{folder.name}/{MARK}").decode(errors="replace").strip()
        if damage is None:
            return copy
        return Copy(copy.step, copy.place, copy.metadata, copy.manifest_name, copy.manifest_data, None, damage)


def _key(folder: Folder) -> tuple[str, int, float]:
    """What changes when another checkpoint is published in a folder."""
    stamp = folder.entries[METADATA]
    return folder.name, stamp.size, stamp.modified


def _read(volume: Volume, folder: Folder) -> Copy:
    place = volume.shown(folder.name)
    metadata = manifest_data = b""
    name = ""
    try:
        metadata = volume.read(f"{folder.name}/{METADATA}")
        name = unseal(metadata)[1].manifest
        manifest_data = volume.read(f"{folder.name}/{name}")
        header = parse(metadata, manifest_data, folder.step)
    except (DamagedError, VolumeMissing) as error:
        return Copy(folder.step, place, metadata, name, manifest_data, damage=str(error))
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error
    return Copy(folder.step, place, metadata, name, manifest_data, header)


def parse(metadata: bytes, manifest_data: bytes, step: int) -> Manifest:
    """The manifest that a `.metadata` names, from the bytes of both.

    Raises:
        DamagedError: They are not those of one checkpoint of this step.
        CheckpointError: Of a later format than this version reads.
    """
    _, seal = unseal(metadata)
    if files.crc32(manifest_data) != seal.manifest_crc32:
        raise DamagedError(f"{seal.manifest} is not the manifest that {METADATA} names (checksum differs)")
    manifest = Manifest.from_bytes(manifest_data)
    if manifest.step != step:
        raise DamagedError(f"it holds step {manifest.step}, but its folder is named for step {step}")
    return manifest


def _wrong_size(copy: Copy, folder: Folder) -> str | None:
    for name, record in copy.manifest.files.items() if copy.header is not None else ():
        entry = folder.entries.get(name)
        if entry is None:
            return f"{name} is missing"
        if entry.size != record.size:
            return f"{name} has {entry.size:,} bytes instead of {record.size:,}"
    return None
