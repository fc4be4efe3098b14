"""What a checkpoint says of itself, proven before anything uses it.

Guarantee: of a checkpoint that carries checksums, the record and the manifest are those that were published, or it is
refused; each name in them stays in its folder and each range in its file. Of a stock checkpoint, which has none, the
record builds torch's own classes only and names plain files.
"""

from __future__ import annotations

import json
import pickle
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from framework.checkpoint.compat import StorageInfo
from framework.checkpoint.files import DamagedError, FileRecord, num_pieces
from framework.checkpoint.manifest import FORMAT, METADATA, unseal
from framework.checkpoint.record import check_apart, unpickle
from framework.errors import CheckpointError
from framework.volume import Volume, VolumeMissing

RENEWALS = 5  # how often a checkpoint may be replaced by other saves while it is read
_PLAIN = re.compile(r"[^./\\\0\ud800-\udfff][^/\\\0\ud800-\udfff]*")
_OURS = re.compile(r"manifest\..+\.json")


@dataclass(frozen=True, slots=True)
class Proven:
    """A checkpoint that may be read.

    Args:
        record: torch's record.
        files: Sizes and checksums by file name; none for a stock checkpoint, which has none.
        manifest: Bytes of the manifest, empty for a stock checkpoint.
        manifest_name: Its name.
        metadata: Bytes of `.metadata`.
    """

    record: Metadata
    files: Mapping[str, FileRecord] | None
    manifest: bytes
    manifest_name: str
    metadata: bytes


def make_manifest(files: Mapping[str, FileRecord], world_size: int) -> bytes:
    """The manifest of a checkpoint that plain `dcp.save` has written."""
    return (
        json.dumps(
            {
                "format": FORMAT,
                "writer": "VolumeWriter",
                "world_size": world_size,
                "created": time.time(),
                "versions": {"torch": torch.__version__},
                "files": {name: {"size": file.size, "crc32": list(file.crc32)} for name, file in files.items()},
            },
            indent=1,
        ).encode()
        + b"\n"
    )


def prove(volume: Volume) -> Proven:
    """Reads and checks the record of a checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged; the message names the file.
        VolumeError: The place cannot be read.
    """
    data = _metadata(volume)
    for is_last in (*(False,) * RENEWALS, True):
        try:
            return _prove(volume, data)
        except DamagedError as error:
            before, data = data, data if is_last else _metadata(volume)
            if data == before:  # otherwise another save has replaced it meanwhile
                raise CheckpointError(
                    f"{volume.place}: {error}. Nothing was loaded; use another checkpoint."
                ) from error
    raise AssertionError


def _metadata(volume: Volume) -> bytes:
    try:
        return volume.read(METADATA)
    except VolumeMissing as error:
        if volume.path is not None and not volume.path.exists():
            raise CheckpointError(f"{volume.place} does not exist. Give the folder of a checkpoint.") from error
        raise CheckpointError(
            f"{volume.place} holds no checkpoint: there is no {METADATA} in it, so none was ever finished there."
        ) from error


def _prove(volume: Volume, data: bytes) -> Proven:
    try:
        pickled, seal = unseal(data)
    except DamagedError as error:
        if not data.endswith(pickle.STOP):  # a stock record is a pickle and nothing else
            raise
        record = _checked(unpickle(data), None)
        if isinstance(name := getattr(record.storage_meta, "save_id", None), str) and _OURS.fullmatch(name):
            raise error  # ours, cut off before its seal
        return Proven(record, None, b"", "", data)
    try:
        manifest = volume.read(seal.manifest)
    except VolumeMissing as error:
        raise DamagedError(f"{seal.manifest} is missing") from error
    if zlib.crc32(manifest) != seal.manifest_crc32:
        raise DamagedError(f"{seal.manifest} is damaged (checksum differs)")
    files = _files(manifest)
    return Proven(_checked(unpickle(pickled), files), files, manifest, seal.manifest, data)


def _files(manifest: bytes) -> dict[str, FileRecord]:
    try:
        value = json.loads(manifest)
        number, entries = int(value["format"]), dict(value["files"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"the manifest is none: {error!r}") from error
    if number > FORMAT:
        raise CheckpointError(f"The checkpoint has format {number}; this version reads up to {FORMAT}.")
    return {_plain(name): _record(name, entry) for name, entry in entries.items()}


def _record(name: str, entry: Any) -> FileRecord:
    match entry:
        case {"size": int(size), "crc32": list(sums)} if (
            size >= 0 and len(sums) == num_pieces(size) and all(isinstance(one, int) for one in sums)
        ):
            return FileRecord(size, tuple(sums))
    raise DamagedError(f"the manifest's size and checksums of {name} are {entry!r:.80}")


def _plain(name: Any) -> str:
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise DamagedError(f"it names a file outside of its folder: {name!r:.120}")
    return name


def _checked(record: Any, files: Mapping[str, FileRecord] | None) -> Metadata:
    try:
        is_record = isinstance(record, Metadata) and all(
            isinstance(key, str) and isinstance(entry, TensorStorageMetadata | BytesStorageMetadata)
            for key, entry in record.state_dict_metadata.items()
        )
        if not is_record or not isinstance(record.storage_data, dict):
            raise DamagedError(f"{METADATA} is not a record of a checkpoint")
        for index, place in record.storage_data.items():
            _check_place(index, place, files)
        check_apart(record)
    except DamagedError:
        raise
    except Exception as error:  # attributes of the wrong kind
        raise DamagedError(f"{METADATA} is not a record of a checkpoint: {type(error).__name__}: {error}") from error
    return record  # type: ignore[no-any-return]


def _check_place(index: Any, place: Any, files: Mapping[str, FileRecord] | None) -> None:
    if not isinstance(index, MetadataIndex) or not isinstance(place, StorageInfo):
        raise DamagedError(f"{METADATA} describes a place by a {type(place).__name__}")
    if getattr(place, "transform_descriptors", None):
        raise CheckpointError(
            f"'{index.fqn}' was stored by an extension ({', '.join(place.transform_descriptors or ())}), "
            f"which VolumeReader does not read. Use torch's FileSystemReader with that extension."
        )
    name = _plain(place.relative_path)
    if min(place.offset, place.length) < 0:
        raise DamagedError(f"'{index.fqn}' lies outside of {name}")
    if files is not None and name not in files:
        raise DamagedError(f"'{index.fqn}' lies in {name}, which the manifest does not name")
    if files is not None and place.offset + place.length > files[name].size:
        raise DamagedError(f"'{index.fqn}' lies outside of {name}")


def referenced(volume: Volume, data: bytes | None = None) -> set[str]:
    """The files of a checkpoint; empty if there is none, or none that can be read.

    Args:
        volume: Where it is, or was published.
        data: Its `.metadata`; if left out, of the one that is published now.
    """
    try:
        proven = prove(volume) if data is None else _prove(volume, data)
    except Exception:  # whatever it is, it is no checkpoint of which anything could be said
        return set()
    named = {place.relative_path for place in (proven.record.storage_data or {}).values()}
    return named | set(proven.files or ()) | ({proven.manifest_name} - {""})
