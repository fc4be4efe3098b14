"""`VolumeWriter`: plain `dcp.save` and `dcp.async_save` to any mounted path or URL.

Guarantee: a save appears whole, by the one put of `.metadata` that ends it, or not at all; its files have names of
their own, so that a checkpoint that is there already stays readable until the new one replaces it. An error on any
rank is raised on all of them. Where the place is no mounted path, the files are on this host's disk before the upload.
"""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from framework.checkpoint import compat
from framework.checkpoint.dcp import values
from framework.checkpoint.dcp.local_copies import LocalCopy, remove
from framework.checkpoint.dcp.parallel import each
from framework.checkpoint.dcp.publication import Publication, Report
from framework.checkpoint.dcp.rank_values import refuse_ungrouped
from framework.checkpoint.dcp.shards import Shard, Summing, lay_out
from framework.checkpoint.files import WRITE_BYTES, FileRecord
from framework.checkpoint.plan import FILE_BYTES
from framework.errors import CheckpointError
from framework.volume import Volume, VolumeError, open_volume


class VolumeWriter(StorageWriter):
    """Writes the checkpoint of `dcp.save(state, storage_writer=VolumeWriter(place))`.

    What it writes is read by `VolumeReader`, and by torch's own reader. Values are refused that could not be read
    again without running code, and plain tensors or values that differ between ranks under one key; see `per_rank`.

    For a URL, each rank's files are first whole on this host, in the folder `local`, and then uploaded. A process that
    dies in a save leaves what it had written: files of names that no other save uses (`__0_0.<tag>.distcp`), which no
    `.metadata` names and no reader looks at. They take room until the folder is removed. Of several writers that save
    to one place at once, the last one's checkpoint stays; what the others leave is removed by a save an hour later.

    Args:
        place: A path, or a URL: `s3://`, `gs://`, `az://`, `file://`, `memory://` (in one process).
        keep_local: For URLs: how many copies of checkpoints beside each other stay on this host's disk, for a restart
            here.
        local: For URLs: folder of these copies, with room for one checkpoint more than are kept; if left out,
            `$XDG_CACHE_HOME/goodput-framework/volumes` (`~/.cache` without that variable).
        retry_seconds: How long a store may fail before that is an error.
        threads: Files written or uploaded at once, by each rank.
        file_bytes: About how long a file may become before another one is begun.

    Raises:
        ValueError: A number is out of range.
        VolumeError: The URL is of no known kind, or cannot be written: `http://` and `https://`.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        keep_local: int = 1,
        local: str | os.PathLike[str] | None = None,
        retry_seconds: float = 60.0,
        threads: int = 4,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        super().__init__()
        if keep_local < 0 or threads < 1 or file_bytes < 1 or retry_seconds < 0:
            raise ValueError(
                f"VolumeWriter({os.fspath(place)!r}): keep_local={keep_local} and retry_seconds={retry_seconds} must "
                f"be at least 0, threads={threads} and file_bytes={file_bytes} at least 1."
            )
        self._keep_local = keep_local
        self._local = None if local is None else Path(local).absolute()
        self._retry_seconds = retry_seconds
        self._threads = threads
        self._file_bytes = file_bytes
        self._rank = 0
        self._tag = ""
        self._items: list[WriteItem] | None = None
        self._open(place)

    def _open(self, place: str | os.PathLike[str]) -> None:
        self._place = os.fspath(place) if "://" in os.fspath(place) else os.path.abspath(place)
        self._volume: Volume | None = _writable(self._place, self._retry_seconds)

    def __getstate__(self) -> dict[str, Any]:
        """For `async_save` in a process, which opens the volume itself."""
        return self.__dict__ | {"_volume": None}

    @property
    def volume(self) -> Volume:
        """Where the checkpoint goes."""
        if self._volume is None:
            self._open(self._place)
        assert self._volume is not None
        return self._volume

    @property
    def checkpoint_id(self) -> str:
        """The path or URL."""
        return self._place

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer can write there."""
        try:
            _writable(os.fspath(checkpoint_id), 0.0)
        except Exception:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aims at another place: torch calls this with the `checkpoint_id` of `dcp.save`."""
        if checkpoint_id is not None:
            self._open(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """What torch shows the planner."""
        return StorageMeta(checkpoint_id=self._place)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save; all ranks.

        Raises:
            CheckpointError: `use_collectives=False`, or several ranks without `init_process_group`: no rank would know
                of the others.
        """
        if not kwargs.get("use_collectives", True):
            raise CheckpointError("VolumeWriter publishes what all ranks have agreed on: use_collectives must be True.")
        refuse_ungrouped(f"nothing was written to {self._place}", "all ranks would save there as rank 0")
        compat.self_test()
        rank = kwargs.get("rank")
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._rank = int(rank)
        self._tag = uuid.uuid4().hex[:12]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Says which keys this rank holds, before torch drops those that others hold too."""
        self._items = list(plan.items) if plan.usable else None
        return dataclasses.replace(plan, storage_data=frozenset(item.index for item in plan.items))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells each rank which of its keys other ranks hold too; on the coordinator."""
        if not all(plan.usable and isinstance(plan.storage_data, frozenset) for plan in plans):
            return [dataclasses.replace(plan, storage_data=None) for plan in plans]  # torch sent only what changed
        held = Counter(index for plan in plans for index in plan.storage_data)
        return [
            dataclasses.replace(plan, storage_data=frozenset(index for index in plan.storage_data if held[index] > 1))
            for plan in plans
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files. An error is told to the coordinator, which raises it on all ranks."""
        report = Report(self._rank)
        try:
            self._write(plan, planner, report)
        except Exception as error:  # every rank must hear of it, whatever it is
            report.error = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        future: Future[list[WriteResult]] = Future()
        future.set_result([report])  # type: ignore[list-item]  # torch hands it to finish as it is
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner, report: Report) -> None:
        report.digests = self._digests(plan, planner)
        shards, report.places = lay_out(plan.items, planner, self._file_bytes)
        names = [f"__{self._rank}_{number}.{self._tag}.distcp" for number in range(len(shards))]
        if self.volume.path is not None:
            self._write_into(self.volume, names, shards, report)
            return
        copy = self._copy()
        copy.prune(self._keep_local, spares_own=True)
        copy.forget_older(self._rank)
        with copy.used(self._tag) as folder:
            self._write_into(open_volume(folder), names, shards, report)
            try:
                self._upload(folder, names, report)
            except Exception as error:  # the copy is whole: the coordinator keeps it, and raises this
                report.upload_error = str(error)
        if self._keep_local == 0 and report.upload_error is None:
            remove([copy.folder / name for name in names])

    def _copy(self) -> LocalCopy:
        return LocalCopy(self.volume.place, self._local)

    def _write_into(self, volume: Volume, names: list[str], shards: list[Shard], report: Report) -> None:
        def write(file: tuple[str, Shard]) -> FileRecord:
            name, shard = file
            parts = Summing(shard.parts())
            volume.upload(name, parts, shard.size)
            return parts.record

        try:
            records = each(self._threads, write, list(zip(names, shards, strict=True)))
            report.files.update(zip(names, records, strict=True))
        except BaseException:
            Publication(volume, self._tag, None, self._threads).discard(names)
            report.files.clear()
            raise

    def _upload(self, folder: Path, names: list[str], report: Report) -> None:
        def upload(name: str) -> None:
            self.volume.upload(name, _parts(folder / name), report.files[name].size)

        each(self._threads, upload, names)

    def _digests(self, plan: SavePlan, planner: SavePlanner) -> dict[MetadataIndex, bytes]:
        """What this rank holds under keys that others hold too."""
        items = self._items
        if items is None:  # torch has the plan cached
            state = getattr(planner, "state_dict", None)
            items = plan.items if state is None else create_default_local_save_plan(state, self._rank == 0).items
        shared = plan.storage_data
        found = {}
        for item in items:
            if shared is None or item.index in shared:
                data = planner.resolve_data(item)
                value: Any = data
                if isinstance(data, io.BytesIO):
                    value = values.load(data.getvalue(), f"'{item.index.fqn}' could be saved, but")
                found[item.index] = values.digest(value)
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes, on the coordinator; torch raises what it raises on all ranks.

        Raises:
            CheckpointError: Something went wrong on any rank; nothing was published.
        """
        reports: list[Any] = [report for result in results for report in result]
        if self.volume.path is not None:
            Publication(self.volume, self._tag, None, self._threads).publish(metadata, reports)
            return
        copy = self._copy()
        with copy.used(f"{self._tag}-publish") as folder:
            names = Publication(self.volume, self._tag, folder, self._threads).publish(metadata, reports)
            copy.keep_only(names)
        copy.prune(self._keep_local)


def _writable(place: str, retry_seconds: float) -> Volume:
    if place.lower().startswith(("http://", "https://")):
        raise VolumeError(
            f"{place} can only be read. Save to a path or to s3://, gs:// or az://; VolumeReader reads http:// URLs."
        )
    return open_volume(place, retry_seconds=retry_seconds)


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        while part := stream.read(WRITE_BYTES):
            yield part
