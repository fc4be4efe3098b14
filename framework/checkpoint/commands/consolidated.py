"""Tensors in one file, or several with an index, in the formats that other tools read.

Guarantee: files get their names when all of them are whole and on disk; what was there before is replaced only when
that is asked for, and never by half of something.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint import files
from framework.checkpoint.commands.weights import Weights
from framework.errors import CheckpointError
from framework.speaking import note, progress

SHARD_BYTES = 4 << 30  # of one safetensors file


def write_torch(weights: Weights, target: Path, *, force: bool) -> list[Path]:
    """A file for `torch.load(weights_only=True)`: a state dict, in which tied weights are one tensor.

    Raises:
        CheckpointError: The checkpoint is damaged, a file is there, or the disk failed.
    """
    with _writing(target, force) as new:
        weights.check()
        groups = weights.groups()
        tensors = _read(weights, groups)
        owner = {name: key for key, names in groups.items() for name in names}
        state: dict[str, Any] = {name: tensors[owner[name]] for name in weights.names} | weights.extra
        new(target.name, lambda path: torch.save(state, path))
    return [target]


def write_safetensors(weights: Weights, target: Path, *, force: bool) -> list[Path]:
    """One file for `safetensors.torch.load_file`, or several of 4 GiB at most with an index, as other tools write it.

    Raises:
        CheckpointError: The checkpoint is damaged, a file is there, a dtype is not known to the format, or the disk
            failed.
    """
    if weights.extra:
        note(f"left out, since they are no tensors: {', '.join(weights.extra)}. A .pt file holds them.")
    shards = _shards(weights)
    stem = target.name.removesuffix(".safetensors")
    names = [target.name]
    if len(shards) > 1:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    index = f"{target.name}.index.json"
    with _writing(target, force, index) as new:
        weights.check()
        for name, shard in zip(names, shards, strict=True):
            tensors = _apart(shard, _read(weights, {weights.names[one]: [one] for one in shard}), weights)
            new(name, lambda path, tensors=tensors: _save(tensors, path))  # type: ignore[misc]
        if len(shards) > 1:
            where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            size = sum(map(weights.opened.size_of, weights.names.values()))
            text = json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2) + "\n"
            new(index, lambda path: path.write_text(text))
    return [target.with_name(name) for name in (names if len(shards) == 1 else [*names, index])]


def _shards(weights: Weights) -> list[list[str]]:
    """Names in groups that fit in a file."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, key in weights.names.items():
        more = weights.opened.size_of(key)
        if shards[-1] and size + more > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    return shards


def _read(weights: Weights, keys: Any) -> dict[str, torch.Tensor]:
    opened = weights.opened
    tensors: dict[str, torch.Tensor] = {}
    with progress(f"reading {opened.place}", sum(map(opened.size_of, keys))) as report:
        for batch in opened.batches(keys):
            tensors |= opened.read(batch)
            report(sum(map(opened.size_of, batch)))
    return tensors


def _apart(names: list[str], tensors: dict[str, torch.Tensor], weights: Weights) -> dict[str, torch.Tensor]:
    """Each name with memory of its own: the format knows no ties, and `strict=True` wants every name."""
    found: dict[str, torch.Tensor] = {}
    used: set[int] = set()
    for name in names:
        tensor = tensors[weights.names[name]]
        found[name] = tensor.clone() if id(tensor) in used else tensor
        used.add(id(tensor))
    return found


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (SafetensorError, KeyError, ValueError) as error:
        kinds = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))
        raise CheckpointError(
            f"{path.parent}: safetensors does not write this ({kinds}): {error}. Export to a .pt file instead."
        ) from error


@contextlib.contextmanager
def _writing(target: Path, force: bool, index: str | None = None) -> Iterator[Callable[[str, Any], None]]:
    """Collects files under temporary names; all get theirs at the end, the index last.

    Args:
        target: The file, or what the files are named after.
        force: Whether files that are there are replaced.
        index: Name of the index that several files have.

    Yields:
        What to call with the name of a file and a function that writes to a path.
    """
    folder = target.parent
    _refuse([target, *([target.with_name(index)] if index else [])], force)
    tag = uuid.uuid4().hex[:12]
    made: dict[Path, Path] = {}

    def new(name: str, write: Callable[[Path], Any]) -> None:
        made[folder / name] = temporary = folder / f".{name}.{tag}.tmp"
        write(temporary)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())

    try:
        yield new
        _refuse(list(made), force)
        for old in {target, target.with_name(index or target.name)} - set(made):
            old.unlink(missing_ok=True)  # forced: it would name what is not there any more
        for file, temporary in made.items():
            os.replace(temporary, file)
        files.sync_folder(folder)
    except (OSError, RuntimeError) as error:  # torch.save makes RuntimeErrors of a full disk
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"{target} could not be written: {reason}. Nothing is left of it.") from error
    finally:
        for temporary in made.values():
            with contextlib.suppress(OSError):
                temporary.unlink()


def _refuse(targets: list[Path], force: bool) -> None:
    for one in targets:
        if os.path.lexists(one) and not force:
            raise CheckpointError(f"{one} is there already. Choose another name, or replace it with --force.")
        if one.is_dir():
            raise CheckpointError(f"{one} is a folder. Choose another name.")
