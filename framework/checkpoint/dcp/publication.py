"""From what the ranks have written to a published checkpoint, on rank 0.

Guarantee: `.metadata` is written last and by one put, when every file of every rank is there in its full size, no two
ranks gave different values for one key, and every part of the plan has a place. Otherwise nothing is published, what
was published there before stays as it is, and the error says which rank, file and key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pickle
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from framework.checkpoint.compat import DCP_VERSION, StorageInfo
from framework.checkpoint.dcp.parallel import each
from framework.checkpoint.dcp.proven import make_manifest, referenced
from framework.checkpoint.dcp.shards import Place
from framework.checkpoint.files import FileRecord
from framework.checkpoint.manifest import METADATA, manifest_name, seal
from framework.errors import CheckpointError
from framework.volume import Volume, VolumeError, open_volume

STALE_SECONDS = 3600.0  # between the manifest of a save and the record that names it lies one put
LISTED_FILES = 10_000
_MANIFEST = re.compile(r"manifest\.([0-9a-f]{12})\.json")
_SHARD = re.compile(r"__\d+_\d+\.([0-9a-f]{12})\.distcp")
_MOUNT_WAITS = (0.2, 1.0, 3.0, 10.0)  # seconds


@dataclass(slots=True)
class Report:
    """What one rank has written.

    Args:
        rank: Its number.
        files: Sizes and checksums of its files, in their order.
        places: Where its tensors and values lie in them.
        digests: What it holds under keys that other ranks hold too.
        error: What went wrong, or none.
        upload_error: What went wrong when its files, whole on its host, were uploaded.
    """

    rank: int
    files: dict[str, FileRecord] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    digests: dict[MetadataIndex, bytes] = field(default_factory=dict)
    error: str | None = None
    upload_error: str | None = None


class Publication:
    """Publishes one save.

    Args:
        volume: Where to.
        tag: What the names of this save's files on rank 0 carry.
        local: Folder of the copy on this host, or none.
        threads: Requests at once.
    """

    def __init__(self, volume: Volume, tag: str, local: Path | None, threads: int) -> None:
        self._volume = volume
        self._local = local
        self._threads = threads
        self._tag = tag

    def publish(self, metadata: Metadata, reports: Sequence[Report]) -> set[str]:
        """Checks and publishes. Returns the names of all files of the checkpoint.

        Raises:
            CheckpointError: Nothing was published.
        """
        files = {name: file for report in reports for name, file in report.files.items()}
        try:
            self._check(metadata, reports)
            name = manifest_name(self._tag)
            manifest = make_manifest(files, len(reports))
            self._fill(metadata, reports)
            sealed = seal(pickle.dumps(_with_cuts(metadata, reports), protocol=4), name, manifest)
            self._commit_locally(files, name, manifest, sealed)
            self._check_uploads(reports)
            self._check_sizes(files)
        except BaseException as error:
            self.discard(files)
            if isinstance(error, VolumeError):
                raise CheckpointError(f"{error} Nothing was published in {self._volume.place}.") from error
            raise
        self._put(files, name, manifest, sealed)
        return {*files, name, METADATA}

    def _check(self, metadata: Metadata, reports: Sequence[Report]) -> None:
        place = self._volume.place
        if errors := [f"rank {report.rank}: {report.error}" for report in reports if report.error]:
            raise CheckpointError(f"{'; '.join(errors)} Nothing was published in {place}.")
        if found := _differing(reports):
            raise CheckpointError(
                f"Ranks hold different values under one key: {'; '.join(found[:10])}"
                f"{f' and {len(found) - 10} more' if len(found) > 10 else ''}. Only one of them would be kept, so "
                f"nothing was published in {place}. Wrap what each rank has for itself in per_rank()."
            )
        written = {at.planned for report in reports for at in report.places}
        if missing := sorted({index.fqn for index in _planned(metadata)} - {at.fqn for at in written}) or sorted(
            index.fqn for index in _planned(metadata) if index not in written
        ):
            raise CheckpointError(f"No rank wrote {', '.join(missing[:10])}; nothing was published in {place}.")

    def _fill(self, metadata: Metadata, reports: Sequence[Report]) -> None:
        """The places of all bytes, in torch's record, which `dcp.save` returns."""
        metadata.version = DCP_VERSION
        metadata.storage_meta = StorageMeta(save_id=manifest_name(self._tag))
        metadata.storage_data = {
            at.index: StorageInfo(names[at.number], at.offset, at.length)
            for report in reports
            for names in (list(report.files),)
            for at in report.places
        }

    def _commit_locally(self, files: dict[str, FileRecord], name: str, manifest: bytes, sealed: bytes) -> None:
        """Where all ranks share this host, its copy is a checkpoint of its own, even if an upload failed."""
        if self._local is None:
            return
        local = open_volume(self._local)
        if all(local.size(file) == record.size for file, record in files.items()):
            local.put(name, manifest)
            local.put(METADATA, sealed)

    def _check_uploads(self, reports: Sequence[Report]) -> None:
        if errors := [f"rank {report.rank}: {report.upload_error}" for report in reports if report.upload_error]:
            kept = f" A whole copy is in {self._local} on this host." if self._is_kept() else ""
            raise CheckpointError(f"{'; '.join(errors)} Nothing was published in {self._volume.place}.{kept}")

    def _is_kept(self) -> bool:
        if self._local is None:
            return False
        with contextlib.suppress(OSError):
            return manifest_name(self._tag).encode() in (self._local / METADATA).read_bytes()[-200:]
        return False

    def _check_sizes(self, files: dict[str, FileRecord]) -> None:
        for (name, file), size in zip(files.items(), each(self._threads, self._size, files.items()), strict=True):
            if size != file.size:
                have = "is missing" if size is None else f"has {size:,} bytes"
                raise CheckpointError(
                    f"{self._volume.shown(name)} {have}, but {file.size:,} bytes were written; nothing was published."
                )

    def _size(self, file: tuple[str, FileRecord]) -> int | None:
        """The size of a file as this host sees it; mounts may show what another host wrote a little later."""
        name, record = file
        size = self._volume.size(name)
        for seconds in _MOUNT_WAITS if self._volume.path is not None else ():
            if size == record.size:
                break
            time.sleep(seconds)
            size = self._volume.size(name)
        return size

    def _put(self, files: dict[str, FileRecord], name: str, manifest: bytes, sealed: bytes) -> None:
        volume = self._volume
        began = time.monotonic()
        try:
            volume.put(name, manifest)
        except VolumeError as error:
            self.discard([*files, name])
            raise CheckpointError(f"{error} Nothing was published in {volume.place}.") from error
        before = b""
        with contextlib.suppress(VolumeError):
            before = volume.read(METADATA)  # as late as can be: another writer may publish here, too
        if time.monotonic() - began > STALE_SECONDS / 2:
            self.discard([*files, name])
            raise CheckpointError(f"This process stood still for too long, so nothing was published in {volume.place}.")
        try:
            volume.put(METADATA, sealed)
        except VolumeError as error:
            self._settle([*files, name], sealed, error)
        if before and before != sealed:
            self.discard(referenced(volume, before) - {*files, name})
            self._sweep(name)

    def _sweep(self, own: str) -> None:
        """Removes what writers that save here at once have left: each removes only what it has seen published.

        A save names its manifest within minutes or never, so that an old one that is not named now never will be.
        """
        try:
            found = {one.name: one.modified for one in itertools.islice(self._volume.list(), LISTED_FILES)}
        except VolumeError:
            return
        limit = found.get(own, 0.0) - STALE_SECONDS  # by the clock of the store
        tags = {match[1] for name, time in found.items() if time < limit and (match := _MANIFEST.fullmatch(name))}
        if not tags or not (current := referenced(self._volume)):
            return
        for tag in tags - {match[1] for name in current if (match := _MANIFEST.fullmatch(name))}:
            self.discard(name for name in found if (match := _SHARD.fullmatch(name)) and match[1] == tag)
            self.discard([manifest_name(tag)])

    def _settle(self, names: Iterable[str], sealed: bytes, error: VolumeError) -> None:
        """A put that failed may have arrived; what is there now decides."""
        now: bytes | None = b""
        try:
            now = self._volume.read(METADATA) if self._volume.size(METADATA) is not None else b""
        except VolumeError:
            now = None
        if now == sealed:
            return
        if now is not None:
            self.discard(names)
        raise CheckpointError(f"{error} The checkpoint was not published.") from error

    def discard(self, names: Iterable[str]) -> None:
        """Removes files of this save, as far as that works."""
        for name in names:
            with contextlib.suppress(VolumeError):
                self._volume.delete(name)


def _planned(metadata: Metadata) -> Iterable[MetadataIndex]:
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            yield from (MetadataIndex(key, chunk.offsets) for chunk in entry.chunks)
        else:
            yield MetadataIndex(key)


def _differing(reports: Sequence[Report]) -> list[str]:
    """Keys under which ranks hold different values, each with the ranks."""
    groups: dict[MetadataIndex, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    for report in reports:
        for index, digest in report.digests.items():
            groups[index][digest].append(report.rank)
    found = {}
    for index, ranks in groups.items():
        if len(ranks) > 1:
            shown = " and ".join(f"rank {', '.join(map(str, some[:4]))}" for some in list(ranks.values())[:3])
            found[index.fqn] = f"'{index.fqn}' ({shown})"
    return [found[key] for key in sorted(found)]


def _with_cuts(metadata: Metadata, reports: Sequence[Report]) -> Metadata:
    """The record with tensors that were cut by rows in their parts; the planner may use its own one again."""
    parts = defaultdict(list)
    for report in reports:
        for at in report.places:
            if at.chunk is not None:
                parts[at.planned].append(at.chunk)
    described = dict(metadata.state_dict_metadata)
    for key in {index.fqn for index, chunks in parts.items() if len(chunks) > 1}:
        entry = described[key]
        assert isinstance(entry, TensorStorageMetadata)
        chunks = [part for chunk in entry.chunks for part in parts[MetadataIndex(key, chunk.offsets)]]
        described[key] = dataclasses.replace(entry, chunks=chunks)
    return dataclasses.replace(metadata, state_dict_metadata=described)
