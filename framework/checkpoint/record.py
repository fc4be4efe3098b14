"""torch's `.metadata`: made once per plan, patched for each save, read without running code.

Guarantee: reading builds only the classes in which torch itself writes this record, and checks every name, offset and
shape in it against the manifest before anything uses them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from framework.checkpoint.compat import RECORD_CLASSES, StorageInfo
from framework.checkpoint.files import DamagedError, FileRecord
from framework.checkpoint.manifest import manifest_name, shard_name
from framework.checkpoint.plan import Plan


class RecordTemplate:
    """The pickled record of a plan, in which only the tag of the file names is still open.

    Pickling 5,000 entries holds the interpreter lock for tens of milliseconds; so it is done when planning, and a
    save only replaces the tag.

    Args:
        plan: The agreed plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._open = b""
        self._pickled = b""

    def fill(self, tag: str) -> bytes:
        """The record of a save with this tag."""
        if len(tag) != len(self._open):
            self._open, self._pickled = self._with_open_tag(len(tag))
        return self._pickled.replace(self._open, tag.encode())

    def _with_open_tag(self, length: int) -> tuple[bytes, bytes]:
        """A tag that stands in no key of the state, and the record with it."""
        keys = "\n".join(self._plan.metadata.state_dict_metadata)
        tag = next(mark * length for mark in map(chr, range(ord("@"), 0x7F)) if mark * length not in keys)
        return tag.encode(), _pickle(self._plan, tag)


def _pickle(plan: Plan, tag: str) -> bytes:
    places: dict[MetadataIndex, StorageInfo] = {}
    by_key: dict[str, list[tuple[MetadataIndex, StorageInfo]]] = {}
    for rank, layout in enumerate(plan.layouts):
        names = [shard_name(rank, number, tag) for number in range(len(layout.sizes))]
        for entry in layout.entries:
            info = StorageInfo(names[entry.number], entry.offset, entry.framing.size)
            places[entry.index] = info
            by_key.setdefault(entry.key, []).append((entry.index, info))
    for alias, owner in plan.aliases.items():
        places |= {MetadataIndex(alias, at.offset, at.index): info for at, info in by_key[owner]}
    record = Metadata(
        state_dict_metadata=plan.metadata.state_dict_metadata,
        planner_data=plan.metadata.planner_data,
        storage_data=places,
        storage_meta=StorageMeta(save_id=manifest_name(tag)),
        version=plan.metadata.version,
    )
    return pickle.dumps(record, protocol=4)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in RECORD_CLASSES:
            return RECORD_CLASSES[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise DamagedError(f".metadata asks for {module}.{name}, which no checkpoint needs; it was not loaded")


def read_record(pickled: bytes, files: Mapping[str, FileRecord]) -> Metadata:
    """torch's record of a checkpoint, checked.

    Args:
        pickled: The bytes of `.metadata` before its seal.
        files: The files of the checkpoint by name, from the manifest.

    Raises:
        DamagedError: It is none, asks for code, or names bytes that are not in the files.
    """
    record = unpickle(pickled)
    try:
        _check(record, files)
    except DamagedError:
        raise
    except Exception as error:  # attributes of the wrong kind
        raise DamagedError(f".metadata is not a record of a checkpoint: {type(error).__name__}: {error}") from error
    return record  # type: ignore[no-any-return]


def unpickle(pickled: bytes) -> Any:
    """What a `.metadata` of any origin holds; it is built from torch's own record classes or refused, not checked.

    Raises:
        DamagedError: It is no pickle, or asks for code.
    """
    try:
        return _Unpickler(io.BytesIO(pickled)).load()
    except DamagedError:
        raise
    except Exception as error:  # damaged pickles raise anything
        raise DamagedError(f".metadata cannot be read: {type(error).__name__}: {error}") from error


def _check(record: Any, files: Mapping[str, FileRecord]) -> None:
    if not isinstance(record, Metadata) or not isinstance(record.storage_data, dict):
        raise DamagedError(f".metadata holds a {type(record).__name__}, not a record of a checkpoint")
    for key, entry in record.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            raise DamagedError(f"'{key}' is a pickled Python object, which is not read here")
        if not isinstance(entry, TensorStorageMetadata) or not isinstance(key, str):
            raise DamagedError(f".metadata describes '{key}' by a {type(entry).__name__}")
        if not isinstance(entry.properties.dtype, torch.dtype):
            raise DamagedError(f".metadata gives '{key}' the dtype {entry.properties.dtype!r:.40}")
        for chunk in entry.chunks:
            for size, first, count in zip(entry.size, chunk.offsets, chunk.sizes, strict=True):
                if not 0 <= first <= first + count <= size:
                    raise DamagedError(f".metadata gives '{key}' {list(entry.size)} a part outside of it")
            place = record.storage_data.get(MetadataIndex(key, chunk.offsets))
            if not isinstance(place, StorageInfo):
                raise DamagedError(f".metadata does not say where '{key}' lies")
            file = files.get(place.relative_path)
            if file is None:
                raise DamagedError(f"'{key}' lies in {place.relative_path!r:.80}, which the manifest does not name")
            if not 0 <= place.offset <= place.offset + place.length <= file.size:
                raise DamagedError(f"'{key}' lies outside of {place.relative_path}")
    check_apart(record)


def check_apart(record: Metadata) -> None:
    """Refuses a record in which tensors or values lie over each other: only equal parts of tied tensors share bytes.

    Raises:
        DamagedError: Two ranges of a file overlap; the message names both keys.
    """
    ranges: list[tuple[str, int, int, str, object]] = []
    for key, entry in record.state_dict_metadata.items():
        kinds: dict[MetadataIndex, object] = {MetadataIndex(key): None}
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            kinds = {MetadataIndex(key, chunk.offsets): (dtype, chunk.sizes) for chunk in entry.chunks}
        for index, kind in kinds.items():
            place = record.storage_data.get(index)
            if place is not None and place.length > 0:
                ranges.append((place.relative_path, place.offset, place.offset + place.length, key, kind))
    ranges.sort(key=lambda one: one[:3])
    for one, other in pairwise(ranges):
        (name, first, end, key, kind), (its_name, its_first, its_end, another, its_kind) = one, other
        is_tied = (first, end, kind) == (its_first, its_end, its_kind)
        if name == its_name and its_first < end and not is_tied:
            raise DamagedError(f"'{key}' and '{another}' lie over each other in {name}")


def entries_of(record: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor by joined key."""
    return {
        key: (entry.size, entry.properties.dtype)
        for key, entry in record.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
