"""Checkpoints that torch's own `dcp.save` wrote, and those that `torch_save_to_dcp` made.

Guarantee: no code in one runs: the record is read by the restricted unpickler, Python objects by `weights_only`. No
name in a record leads out of the folder. They have no checksums: what is read is as good as the disk.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from framework.checkpoint import files
from framework.checkpoint.compat import StorageInfo
from framework.checkpoint.dcp.parallel import each
from framework.checkpoint.dcp.proven import prove
from framework.checkpoint.files import DamagedError
from framework.checkpoint.fill import fill, torn
from framework.checkpoint.manifest import METADATA, unseal
from framework.checkpoint.reader import agree, differences
from framework.checkpoint.record import entries_of, unpickle
from framework.checkpoint.verify import check_cover
from framework.distributed import Group
from framework.errors import CheckpointError, StateMismatchError
from framework.volume import open_volume

PREFIXES = ("model.", "state_dict.", "app.model.", "")  # where the published loops put a model's weights
_OURS = "manifest."  # a record of ours names its manifest
ADVICE = "Use the model that wrote it, or none."


def is_stock(folder: Path) -> bool:
    """Whether a folder holds a checkpoint that no writer of this package made.

    Raises:
        UnreadableError: Its `.metadata` cannot be read.
    """
    try:
        data = files.read(folder / METADATA)
    except files.UnreadableError:
        raise
    except DamagedError:
        return False
    try:
        unseal(data)
        return False
    except DamagedError:  # no seal: a stock one, or a damaged one of ours
        return not _has_manifest(folder) and not _names_manifest(data)


def is_plain(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of plain `dcp.save`: a stock one, or one that `VolumeWriter` wrote.

    Raises:
        UnreadableError: It cannot be read.
    """
    return is_stock(folder) or _is_of_volume_writer(folder)


def _is_of_volume_writer(folder: Path) -> bool:
    try:
        _, seal = unseal(files.read(folder / METADATA))
        manifest = json.loads(files.read(folder / seal.manifest))
    except files.UnreadableError:
        raise
    except (DamagedError, ValueError, RecursionError):  # whoever reads it says what is wrong
        return False
    return isinstance(manifest, dict) and manifest.get("writer") == "VolumeWriter"


def record(folder: Path) -> Metadata:
    """torch's record of a stock checkpoint, checked against the files that are there.

    Raises:
        DamagedError: It is none, asks for code, or names bytes that are not there.
    """
    data = files.read(folder / METADATA)
    found = unpickle(data)
    try:
        _check(folder, found)
    except DamagedError:
        raise
    except Exception as error:  # attributes of the wrong kind
        raise DamagedError(f".metadata is not a record of a checkpoint: {type(error).__name__}: {error}") from error
    return found  # type: ignore[no-any-return]


def load_tensors(folder: Path, keys: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a stock checkpoint by joined key, whole and on the CPU, however they were sharded.

    Args:
        folder: The checkpoint.
        keys: Which; none: all tensors.

    Raises:
        DamagedError: A file is damaged.
        CheckpointError: A key is not there, or is no tensor.
    """
    found = record(folder)
    entries = entries_of(found)
    wanted = list(entries if keys is None else keys)
    _refuse_missing(folder, wanted, entries, "tensor")
    tensors = {key: torch.empty(entries[key][0], dtype=entries[key][1]) for key in wanted}
    fill(folder, found, tensors)
    return tensors


def load_objects(folder: Path, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """Python values of a stock checkpoint by joined key.

    Args:
        folder: The checkpoint.
        keys: Which; none: all that are no tensors.

    Raises:
        CheckpointError: A key is not there, or holds what is not loaded without running code; the message names it.
    """
    found = record(folder)
    entries = {key for key, one in found.state_dict_metadata.items() if isinstance(one, BytesStorageMetadata)}
    wanted = list(sorted(entries) if keys is None else keys)
    _refuse_missing(folder, wanted, entries, "Python value")
    return {key: _object(folder, key, found.storage_data[MetadataIndex(key)]) for key in wanted}


def load_model(
    folder: Path, model: Mapping[str, torch.Tensor], group: Group, *, rename: Callable[[str], str] = str
) -> list[str]:
    """Puts the weights of a checkpoint of plain `dcp.save` into a model. A collective.

    Nothing is changed if anything is wrong. What `VolumeWriter` wrote is compared with its checksums before.

    The weights are looked for under `model.`, `state_dict.`, `app.model.` and at the top: where most of the model's
    keys are, the first of these if there are several. Under a name, all that is there must be the model's; at the top,
    all whose first part is one of the model's. The rest is left alone.

    Args:
        folder: The checkpoint.
        model: The live tensors, plain or DTensor, by key.
        group: For the agreement between ranks.
        rename: From a key of the checkpoint, without what is before the model's keys, to the model's key.

    Returns:
        The keys of the checkpoint that were left alone.

    Raises:
        StateMismatchError: Keys, shapes or dtypes differ; the message lists them.
        CheckpointError: It is damaged or cannot be read.
    """
    problem: CheckpointError | None = None
    try:
        found = _verified(folder, group) if _is_of_volume_writer(folder) else record(folder)
        names = _names(found, model, rename)
        entries = {key: entries_of(found)[stored] for key, stored in names.items()}
        text = differences(folder, entries, model, partial=False, advice=ADVICE)
        text = text or torn(folder, found, {names[key]: tensor for key, tensor in model.items()})
        if text and not names.keys() >= model.keys():
            text = f"{text}\n{_what_is_there(found)}"
        problem = StateMismatchError(text) if text else None
    except Exception as error:  # every rank must hear of it, whatever it is
        problem = CheckpointError(f"{folder}: {error}")
    agree(group, problem)
    try:
        fill(folder, found, {names[key]: tensor for key, tensor in model.items()}, local_size=group.world.local_size)
    except Exception as error:  # every rank must hear of it, whatever it is
        problem = CheckpointError(f"{folder}: {error}")
    agree(group, problem)
    return sorted({*found.state_dict_metadata} - {*names.values()})


def _verified(folder: Path, group: Group) -> Metadata:
    """The record of what `VolumeWriter` wrote; this rank's share of the files is compared with the checksums."""
    proven = prove(open_volume(folder))
    check_cover(proven.record)
    records = proven.files or {}
    for name, file in records.items():
        files.check_size(folder / name, file)
    pieces = [(name, piece) for name, file in records.items() for piece in range(files.num_pieces(file.size))]
    share = pieces[group.world.rank :: group.world.size]
    threads = max(1, min(8, (os.cpu_count() or 1) // group.world.local_size))
    each(threads, lambda at: files.check_piece(folder / at[0], records[at[0]], at[1]), share)
    return proven.record


def _what_is_there(found: Metadata) -> str:
    keys = sorted(entries_of(found))
    more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
    looked = ", ".join(f"'{prefix}'" for prefix in PREFIXES if prefix)
    return f"Tensors in the checkpoint: {', '.join(keys[:5]) or 'none'}{more}. A model is looked for under {looked} and at the top."


def _names(found: Metadata, model: Mapping[str, torch.Tensor], rename: Callable[[str], str]) -> dict[str, str]:
    """The keys of the checkpoint that belong to a model, by the model's own names."""

    def under(prefix: str) -> dict[str, str]:
        return {rename(key.removeprefix(prefix)): key for key in entries_of(found) if key.startswith(prefix)}

    prefix = max(PREFIXES, key=lambda one: len(under(one).keys() & model.keys()))
    names = under(prefix)
    if prefix:
        return names
    parts = {key.split(".")[0] for key in model}
    return {key: stored for key, stored in names.items() if key.split(".")[0] in parts}


def _refuse_missing(folder: Path, wanted: Iterable[str], there: Iterable[str], kind: str) -> None:
    if missing := sorted({*wanted} - {*there}):
        raise CheckpointError(f"{folder} holds no {kind} under {', '.join(map(repr, missing[:20]))}.")


def _object(folder: Path, key: str, place: StorageInfo) -> Any:
    raw = bytearray(place.length)
    with files.opened(folder / place.relative_path) as fd:
        if raw:
            files.read_into(fd, [memoryview(raw)], place.offset, place.relative_path)
    try:
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises anything here
        why = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), str(error)[:200])
        raise CheckpointError(f"{folder}: '{key}' is not loaded without running code: {why}") from error


def _has_manifest(folder: Path) -> bool:
    return any(name.startswith(_OURS) and name.endswith(".json") for name in os.listdir(folder))


def _names_manifest(data: bytes) -> bool:
    try:
        found = unpickle(data)
    except DamagedError:
        return False
    return _is_ours(found)


def _is_ours(found: Any) -> bool:
    save_id = getattr(getattr(found, "storage_meta", None), "save_id", None)
    return isinstance(save_id, str) and save_id.startswith(_OURS)


def _check(folder: Path, found: Any) -> None:
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise DamagedError(f".metadata holds a {type(found).__name__}, not a record of a checkpoint")
    if _is_ours(found):
        raise DamagedError(f".metadata is one of this framework without its seal: {folder} is damaged")
    sizes: dict[str, int] = {}
    for key, entry in found.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            indices = [MetadataIndex(key)]
        elif isinstance(entry, TensorStorageMetadata) and isinstance(entry.properties.dtype, torch.dtype):
            indices = [MetadataIndex(key, chunk.offsets) for chunk in entry.chunks]
        else:
            raise DamagedError(f".metadata describes '{key}' by a {type(entry).__name__}")
        for index in indices:
            _check_place(folder, key, found.storage_data.get(index), sizes)
    check_cover(found)


def _check_place(folder: Path, key: str, place: Any, sizes: dict[str, int]) -> None:
    if not isinstance(place, StorageInfo):
        raise DamagedError(f".metadata does not say where '{key}' lies")
    if getattr(place, "transform_descriptors", None):
        raise DamagedError(f"'{key}' is compressed by an extension of its writer, which is not read here")
    name = place.relative_path
    if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\\", "\0"} & {*name}:
        raise DamagedError(f"'{key}' lies outside of the folder: {name!r:.80}")
    if name not in sizes:
        sizes[name] = _size(folder / name)
    if not 0 <= place.offset <= place.offset + place.length <= sizes[name]:
        raise DamagedError(
            f"'{key}' lies outside of {name}, which has {sizes[name]:,} bytes: it is cut off, or another one"
        )


def _size(path: Path) -> int:
    try:
        found = os.lstat(path)
    except FileNotFoundError as error:
        raise DamagedError(f"{path.name} is missing") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(f"{path.name} is not a regular file")
    return found.st_size
