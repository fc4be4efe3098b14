"""A checkpoint that may be looked at: of a run, of `VolumeWriter`, or torch's own, in a folder or at a URL.

Guarantee: no code from it runs, and nothing in its record or manifest leads out of its place. When it is open, every
file is there in its full size and every tensor is covered; `check` compares bytes with their checksums.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from framework.checkpoint import files, stock
from framework.checkpoint.commands.places import is_url
from framework.checkpoint.dcp.parallel import each
from framework.checkpoint.dcp.proven import Proven, prove
from framework.checkpoint.dcp.sources import Copied, Direct, Mounted, Source
from framework.checkpoint.files import PIECE_BYTES, DamagedError, FileRecord, num_pieces
from framework.checkpoint.fill import fill
from framework.checkpoint.manifest import Manifest, unseal
from framework.checkpoint.record import entries_of, read_record
from framework.checkpoint.verify import check_cover
from framework.errors import CheckpointError
from framework.speaking import Report, progress
from framework.volume import Volume, open_volume

RUN, PLAIN, STOCK = "run", "VolumeWriter", "stock"
BATCH_BYTES = 256 << 20
_STEP = re.compile(r"step_(\d{10,})")
Keys = list[str]


@dataclass(frozen=True, slots=True)
class Opened:
    """An open checkpoint.

    Args:
        place: Its folder or URL.
        volume: The same.
        kind: Who wrote it: `run`, `VolumeWriter` or `stock`.
        record: torch's record.
        files: Sizes and checksums by name; none for a stock one, which has no checksums.
        source: Its files.
        proven: The bytes that tie it together.
        header: The manifest, for one of a run.
        copy: The folder that gets the bytes of one at a URL which `check` has compared; none if they are not kept.
    """

    place: str
    volume: Volume
    kind: str
    record: Metadata
    files: Mapping[str, FileRecord] | None
    source: Source
    proven: Proven
    header: Manifest | None
    copy: Path | None = None

    @property
    def folder(self) -> Path:
        """Raises:
        CheckpointError: It lies at a URL, and its bytes are not kept here."""
        folder = self.volume.path or self.copy
        if folder is None:
            raise CheckpointError(
                f"{self.place} is a URL, and only checkpoints with checksums are read from there. Copy it here first: "
                f"python -m framework.checkpoint copy {self.place} FOLDER"
            )
        return folder

    @property
    def entries(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of every tensor by joined key."""
        return entries_of(self.record)

    def ordered(self) -> Keys:
        """Keys of the tensors in the order of their paths; numbers in them count as numbers."""
        return sorted(self.entries, key=lambda key: [_sortable(part) for part in self.path_of(key)])

    def size_of(self, key: str) -> int:
        """Bytes of a tensor."""
        shape, dtype = self.kind_of(key)
        return shape.numel() * dtype.itemsize

    def kind_of(self, key: str) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of a tensor."""
        entry = self.record.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.size, entry.properties.dtype

    def places_of(self, key: str) -> tuple[tuple[str, int, int], ...]:
        """File, offset and length of each part of what lies under a key."""
        entry = self.record.state_dict_metadata[key]
        indices = [MetadataIndex(key)]
        if isinstance(entry, TensorStorageMetadata):
            indices = [MetadataIndex(key, chunk.offsets) for chunk in entry.chunks]
        found = (self.record.storage_data[index] for index in indices)
        return tuple((at.relative_path, at.offset, at.length) for at in found)

    def ties(self) -> dict[str, str]:
        """Keys whose bytes are those of another key, which comes first."""
        owners: dict[Any, str] = {}
        tied = {}
        for key, (shape, dtype) in self.entries.items():
            if shape.numel():
                owner = owners.setdefault((self.places_of(key), shape, dtype), key)
                if owner != key:
                    tied[key] = owner
        return tied

    def path_of(self, key: str) -> tuple[str, ...]:
        """Where a key stands in the nested state that was saved."""
        paths = self.record.planner_data
        path = paths.get(key) if isinstance(paths, Mapping) else None
        if isinstance(path, tuple) and path and all(isinstance(part, str | int) for part in path):
            return tuple(str(part) for part in path)
        return (key,)

    def read(self, keys: Collection[str]) -> dict[str, torch.Tensor]:
        """Tensors by key, whole, contiguous and on the CPU, however they were sharded.

        Raises:
            CheckpointError: A file is damaged or cannot be read.
        """
        tensors = {}
        for key in keys:
            shape, dtype = self.kind_of(key)
            tensors[key] = torch.empty(shape, dtype=dtype)
        try:
            fill(self.folder, self.record, tensors)
        except DamagedError as error:
            raise CheckpointError(f"{self.place}: {error}") from error
        return tensors

    def batches(self, keys: Iterable[str]) -> Iterator[Keys]:
        """Keys in groups that fit in memory, in the order given; a longer tensor is alone."""
        batch: Keys = []
        size = 0
        for key in keys:
            if batch and size + self.size_of(key) > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(key)
            size += self.size_of(key)
        if batch:
            yield batch

    def read_file(self, name: str) -> bytes:
        """All bytes of one of its files.

        Raises:
            CheckpointError: It cannot be read.
        """
        assert self.files is not None
        record = self.files[name]
        if self.copy is not None:
            self._prove([(name, number) for number in range(num_pieces(record.size))], lambda count: None)
        return self.read_range(name, 0, record.size)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of one of its files.

        Raises:
            CheckpointError: They cannot be read.
        """
        raw = bytearray(length)
        try:
            if raw:
                self.source.read_into(name, offset, [memoryview(raw)])
        except DamagedError as error:
            raise CheckpointError(f"{self.place}: {error}") from error
        return bytes(raw)

    def check(self, what: str, keys: Iterable[str] | None = None) -> int:
        """Compares bytes with their checksums, with a bar of progress.

        Args:
            what: What is done, for the bar.
            keys: Only the bytes of these; none: of all files.

        Returns:
            Bytes that were compared; 0 of a stock checkpoint, which has no checksums.

        Raises:
            DamagedError: They differ; the message names place, file and bytes.
        """
        if self.files is None:
            return 0
        pieces = self._pieces(keys)
        size = sum(map(self._length, pieces))
        if self.copy is not None:
            _check_room(self.copy, size, self.place)
        with progress(what, size) as report:
            self._prove(pieces, report)
        return size

    def _length(self, piece: tuple[str, int]) -> int:
        assert self.files is not None
        return min(PIECE_BYTES, self.files[piece[0]].size - piece[1] * PIECE_BYTES)

    def _prove(self, pieces: list[tuple[str, int]], report: Report) -> None:
        known = self.files
        assert known is not None

        def one(at: tuple[str, int]) -> None:
            self.source.prove(at[0], known[at[0]], at[1])
            report(self._length(at))

        try:
            each(files.num_threads(), one, pieces)
        except DamagedError as error:
            raise type(error)(f"{self.place}: {error}") from error

    def _pieces(self, keys: Iterable[str] | None) -> list[tuple[str, int]]:
        assert self.files is not None
        if keys is None:
            return [(name, n) for name, record in self.files.items() for n in range(num_pieces(record.size))]
        spans = [span for key in keys for span in self.places_of(key)]
        found = {
            (name, number)
            for name, offset, length in spans
            if length
            for number in range(offset // PIECE_BYTES, (offset + length - 1) // PIECE_BYTES + 1)
        }
        return sorted(found)


def _sortable(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def open_checkpoint(place: str, copy: Path | None = None) -> Opened:
    """Opens a checkpoint; structure and sizes are checked.

    Args:
        place: Its own folder or URL.
        copy: An empty folder that gets what is read of one at a URL, so that its tensors can be read too.

    Raises:
        CheckpointError: There is none, or it is damaged; the message names place and file.
        VolumeError: The place cannot be read.
    """
    volume = open_volume(place)
    proven = prove(volume)
    try:
        return _opened(place, volume, proven, copy if volume.path is None and proven.files is not None else None)
    except DamagedError as error:
        raise type(error)(f"{place}: {error}") from error


@contextlib.contextmanager
def opened_to_read(place: str) -> Iterator[Opened]:
    """Opens a checkpoint whose tensors are to be read.

    Of one at a URL whatever is compared with its checksums lies in a temporary folder until this ends.

    Args:
        place: Its own folder or URL.

    Raises:
        CheckpointError: There is none, or it is damaged; the message names place and file.
        VolumeError: The place cannot be read.
    """
    if not is_url(place):
        yield open_checkpoint(place)
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        opened = open_checkpoint(place, Path(folder))
        try:
            yield opened
        finally:
            if isinstance(opened.source, Copied):
                opened.source.close()


def _check_room(folder: Path, size: int, place: str) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise CheckpointError(
            f"{files.words_of(size)} of {place} are to be fetched to {folder.parent}, and {files.words_of(free)} are free "
            f"there. Name a folder with more room in TMPDIR."
        )


def _opened(place: str, volume: Volume, proven: Proven, copy: Path | None) -> Opened:
    source: Source = Mounted(volume.path) if volume.path is not None else Direct(volume)
    if copy is not None:
        source = Copied(volume, copy)
    if proven.files is None:
        record = stock.record(volume.path) if volume.path is not None else proven.record
        if volume.path is None:
            _check_ends(source, record)
        return Opened(place, volume, STOCK, record, None, source, proven, None)
    if json.loads(proven.manifest).get("writer") == PLAIN:
        kind, header, record = PLAIN, None, proven.record
    else:
        kind, header = RUN, Manifest.from_bytes(proven.manifest)
        record = read_record(unseal(proven.metadata)[0], header.files)
        match = _STEP.fullmatch(place.rstrip("/").rpartition("/")[2])
        if match and int(match[1]) != header.step:
            raise DamagedError(f"it holds step {header.step}, but its folder is named for step {int(match[1])}")
    check_cover(record)
    for name, known in proven.files.items():
        _check_size(name, source.size(name), known.size)
    return Opened(place, volume, kind, record, proven.files, source, proven, header, copy)


def _check_size(name: str, size: int | None, wanted: int) -> None:
    if size is None:
        raise DamagedError(f"{name} is missing")
    if size != wanted:
        raise DamagedError(f"{name} has {size:,} bytes instead of {wanted:,}")


def _check_ends(source: Source, record: Metadata) -> None:
    ends: dict[str, int] = defaultdict(int)
    for at in record.storage_data.values():
        ends[at.relative_path] = max(ends[at.relative_path], at.offset + at.length)
    for name, end in ends.items():
        size = source.size(name)
        if size is None or size < end:
            raise DamagedError(f"{name} is missing" if size is None else f"{name} is cut off at byte {size:,}")
