"""`VolumeReader`: plain `dcp.load` from any mounted path or URL.

Guarantee: every byte that a load needs is compared with its checksum, and every value read without running code, on
all ranks before the first tensor is filled on any; a damaged checkpoint is refused with the name of the file and the
state given to `dcp.load` stays as it was. Of stock checkpoints, which have no checksums, sizes are checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from framework.checkpoint.dcp import values
from framework.checkpoint.dcp.filling import Wanted, fill, settle, wanted
from framework.checkpoint.dcp.local_copies import LocalCopy
from framework.checkpoint.dcp.parallel import each
from framework.checkpoint.dcp.proven import RENEWALS, Proven, prove
from framework.checkpoint.dcp.rank_values import SavedKeys, is_of_rank, refuse_ungrouped
from framework.checkpoint.dcp.sources import Copied, Direct, Mounted, Source
from framework.checkpoint.files import PIECE_BYTES, DamagedError
from framework.errors import CheckpointError
from framework.volume import Volume, VolumeError, open_volume


class VolumeReader(StorageReader):
    """Reads the checkpoint for `dcp.load(state, storage_reader=VolumeReader(place))`.

    Reads what `VolumeWriter`, the framework's runs and torch's own writer have written. A tensor keeps its dtype: one
    that is saved in another is refused unless `cast` is given.

    Args:
        place: A path, or a URL: `s3://`, `gs://`, `az://`, `http://`, `file://`, `memory://` (in one process).
        local: For URLs: folder of the copies on this host; if left out,
            `$XDG_CACHE_HOME/goodput-framework/volumes` (`~/.cache` without that variable).
        retry_seconds: How long a store may fail before that is an error.
        threads: Pieces read and compared at once, by each rank.
        cast: Convert tensors that are saved in another dtype.

    Raises:
        ValueError: A number is out of range.
        VolumeError: The URL is of no known kind.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        local: str | os.PathLike[str] | None = None,
        retry_seconds: float = 60.0,
        threads: int = 4,
        cast: bool = False,
    ) -> None:
        super().__init__()
        if threads < 1 or retry_seconds < 0:
            raise ValueError(
                f"VolumeReader({os.fspath(place)!r}): threads={threads} must be at least 1, "
                f"retry_seconds={retry_seconds} at least 0."
            )
        self._local = None if local is None else Path(local).absolute()
        self._retry_seconds = retry_seconds
        self._threads = threads
        self._cast = cast
        self._open(place)

    def _open(self, place: str | os.PathLike[str]) -> None:
        self._volume: Volume = open_volume(os.fspath(place), retry_seconds=self._retry_seconds)
        self._proven: Proven | None = None
        self._source: Source | None = None
        self._failure: Exception | None = None
        self._seen: set[tuple[str, int]] = set()
        self._wants: dict[ReadItem, Wanted] = {}
        self._values: dict[MetadataIndex, bytes] = {}
        self._in_use = contextlib.ExitStack()

    @property
    def checkpoint_id(self) -> str:
        """The path or URL."""
        return self._volume.place

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader can read there."""
        try:
            open_volume(os.fspath(checkpoint_id))
        except Exception:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aims at another place: torch calls this with the `checkpoint_id` of `dcp.load`."""
        self._in_use.close()
        self._open(self._volume.place if checkpoint_id is None else checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """torch's record of the checkpoint, proven.

        Raises:
            CheckpointError: There is no checkpoint, or it is damaged.
            VolumeError: The place cannot be read.
        """
        if kwargs.get("rank") is not None and self._failure is not None:
            # torch has dropped the error and asks for a rank's own record; it hears of it when it sets up
            return Metadata({})
        self._failure = None
        try:
            self._proven = prove(self._volume)
        except Exception as error:
            self._failure = error
            raise
        record = self._proven.record
        described = SavedKeys(record.state_dict_metadata, self._volume.place)
        meta = record.storage_meta or StorageMeta()
        return dataclasses.replace(record, state_dict_metadata=described, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a load; all ranks. The coordinator checks that every file is there in its full size.

        Raises:
            CheckpointError: What `read_metadata` raised, or a file is missing or has another size.
        """
        if self._failure is not None:
            raise self._failure
        assert self._proven is not None
        self._in_use.close()
        self._seen.clear()
        self._wants.clear()
        self._values.clear()
        if self._volume.path is not None:
            self._source = mounted = Mounted(self._volume.path)
            self._in_use.callback(mounted.close)
        elif self._proven.files is None:
            self._source = Direct(self._volume)
        else:
            copy = LocalCopy(self._volume.place, self._local)
            copy.prune_read({*self._proven.files, self._proven.manifest_name})
            folder = self._in_use.enter_context(copy.used(uuid.uuid4().hex[:12], "read"))
            self._source = copied = Copied(self._volume, folder)
            self._in_use.callback(copied.close)
        if is_coordinator:
            self._read_steadily(lambda: self._check_sizes(set(self._ends())))

    def _read_steadily(self, work: Callable[[], None]) -> None:
        """Does it again, a few times, with the record of another save that has replaced the checkpoint meanwhile."""
        for is_last in (*(False,) * RENEWALS, True):
            try:
                with self._named():
                    return work()
            except CheckpointError as error:
                if is_last or not isinstance(error.__cause__, DamagedError) or not self._renew():
                    raise

    def _renew(self) -> bool:
        """Whether there is a new record by which torch's plan, made from the old one, can be fulfilled."""
        before, now = self._proven, prove(self._volume)
        assert before is not None
        if now.metadata == before.metadata:
            return False
        if now.record.state_dict_metadata != before.record.state_dict_metadata or (now.files is None) != (
            before.files is None
        ):
            raise CheckpointError(
                f"{self._volume.place}: another save, of other keys or shapes, replaced the checkpoint while it was read. "
                f"Nothing was loaded; load it again."
            )
        self._proven = now
        self._seen.clear()
        self._wants.clear()
        self._values.clear()
        return True

    def _ends(self) -> dict[str, tuple[int, bool]]:
        """The length of each file, and whether it is exact; of stock checkpoints only the end of what is used."""
        assert self._proven is not None
        if self._proven.files is not None:
            return {name: (file.size, True) for name, file in self._proven.files.items()}
        ends: dict[str, tuple[int, bool]] = {}
        for place in self._proven.record.storage_data.values():
            end = max(ends.get(place.relative_path, (0, False))[0], place.offset + place.length)
            ends[place.relative_path] = (end, False)
        return ends

    def _check_sizes(self, names: Iterable[str]) -> None:
        source, ends = self._source, self._ends()
        assert source is not None
        ordered = sorted(names)
        for name, size in zip(ordered, each(self._threads, source.size, ordered), strict=True):
            end, is_exact = ends[name]
            if size is None:
                raise DamagedError(f"{name} is missing")
            if size != end if is_exact else size < end:
                raise DamagedError(f"{name} has {size:,} bytes instead of {'' if is_exact else 'at least '}{end:,}")

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Says of what checkpoint an error is."""
        try:
            yield
        except DamagedError as error:
            raise CheckpointError(
                f"{self._volume.place}: {error}. Nothing was loaded; use another checkpoint."
            ) from error
        except VolumeError as error:
            raise CheckpointError(f"{error} Nothing was loaded.") from error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Proves everything that this rank is going to read; torch goes on only if all ranks could.

        Raises:
            CheckpointError: Something is damaged; the message names the file. Or values of `per_rank` are asked for
                by one of several ranks without `init_process_group`.
        """
        if any(is_of_rank(item.storage_index.fqn) for item in plan.items):
            refuse_ungrouped(self._volume.place, "no rank would hear of what another could not load")
        self._read_steadily(lambda: self._prove(plan))
        assert self._proven is not None
        return dataclasses.replace(plan, storage_data=zlib.crc32(self._proven.metadata))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are; on the coordinator.

        Raises:
            CheckpointError: Another save replaced the checkpoint, and some ranks have found the one, some the other.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointError(
                f"{self._volume.place}: another save replaced the checkpoint while the ranks read it, so that they found "
                f"two. Nothing was loaded; load it again."
            )
        return plans

    def _prove(self, plan: LoadPlan) -> None:
        assert self._proven is not None and self._source is not None
        source = self._source
        items = [item for item in plan.items if item not in self._wants]
        wants = [wanted(item, self._proven.record, self._volume.place) for item in items]
        self._prove_bytes(wants)
        settled = each(self._threads, lambda want: settle(source, want), wants)
        self._prove_bytes([want for want, before in zip(settled, wants, strict=True) if want is not before])
        for item, want in zip(items, settled, strict=True):
            if item.type is LoadItemType.BYTE_IO and item.storage_index not in self._values:
                self._values[item.storage_index] = self._value(want)
            self._wants[item] = want

    def _prove_bytes(self, wants: list[Wanted]) -> None:
        assert self._proven is not None and self._source is not None
        source, known = self._source, self._proven.files
        if known is None:
            self._check_sizes({want.place.relative_path for want in wants})
            return
        pieces = sorted(_pieces(wants) - self._seen)
        each(self._threads, lambda at: source.prove(at[0], known[at[0]], at[1]), pieces)
        self._seen |= set(pieces)

    def _value(self, want: Wanted) -> bytes:
        """A value, read without running code and saved anew: torch's planner then loads what it likes."""
        assert self._source is not None
        raw = bytearray(want.place.length)
        if raw:
            self._source.read_into(want.place.relative_path, want.place.offset, [memoryview(raw)])
        where = f"{self._volume.shown(want.place.relative_path)}: '{want.item.storage_index.fqn}'"
        return values.dump(values.load(bytes(raw), where))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors and hands out the values.

        Raises:
            CheckpointError: A target does not fit what is saved; nothing was filled on this rank.
        """
        source = self._source
        assert source is not None
        with self._named():
            self._prove(plan)
        targets = [(want, self._target(want, planner)) for want in (self._wants[item] for item in plan.items)]
        filled = [(want, target) for want, target in targets if target is not None]
        with self._named():
            filled.sort(key=lambda pair: (pair[0].place.relative_path, pair[0].ranges[0]))
            each(self._threads, lambda pair: fill(source, *pair), filled)
        for want, target in targets:
            if target is None:
                planner.load_bytes(want.item, io.BytesIO(self._values[want.item.storage_index]))
            else:
                planner.commit_tensor(want.item, target)
        self._in_use.close()
        self._wants.clear()
        self._values.clear()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _target(self, want: Wanted, planner: LoadPlanner) -> torch.Tensor | None:
        """Where a tensor goes; none for a value."""
        key, place = want.item.storage_index.fqn, self._volume.place
        if want.item.type is LoadItemType.BYTE_IO:
            mine = (getattr(planner, "state_dict", None) or {}).get(want.item.dest_index.fqn)
            if isinstance(mine, torch.Tensor):
                raise CheckpointError(
                    f"{place}: '{key}' is a Python value there and a tensor here. Nothing was loaded; give what was saved."
                )
            return None
        target = planner.resolve_tensor(want.item).detach()
        if target.shape != want.item.lengths:
            raise CheckpointError(
                f"{place}: '{key}' has {list(want.item.lengths)} there and {list(target.shape)} here. Nothing was loaded."
            )
        if target.dtype != want.dtype and not self._cast:
            raise CheckpointError(
                f"{place}: '{key}' is {want.dtype} there and {target.dtype} here. Nothing was loaded; load it as "
                f"{want.dtype}, or convert on purpose by VolumeReader(..., cast=True)."
            )
        if any(step == 0 and length > 1 for step, length in zip(target.stride(), target.shape, strict=True)):
            raise CheckpointError(
                f"{place}: several values of '{key}' share memory here (it is expanded), so it cannot be filled. Nothing "
                f"was loaded; give a tensor of its own, e.g. by contiguous()."
            )
        return target


def _pieces(wants: list[Wanted]) -> set[tuple[str, int]]:
    """The pieces with the bytes that are needed, each as file and number."""
    return {
        (want.place.relative_path, number)
        for want in wants
        for first, end in want.ranges
        if end > first
        for number in range(first // PIECE_BYTES, (end - 1) // PIECE_BYTES + 1)
    }
