"""From staged bytes to a published checkpoint: the same outcome on every rank, or none at all.

Guarantee: `.metadata` appears last, when every other byte is durable on every rank, has been compared with the plan,
and the run is still owned by this attempt. An error on any rank is heard by all, nobody publishes, and the files of
the save are removed. Files of other saves are never opened for writing. Where hosts do not see each other's disks,
nothing is published here: their parts wait for the upload, and the remote copy is the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from framework.checkpoint import files
from framework.checkpoint.content import SaveHeader, SaveResult
from framework.checkpoint.files import DamagedError, FileRecord
from framework.checkpoint.manifest import (
    METADATA,
    Manifest,
    make_tag,
    manifest_name,
    rank_name,
    seal,
    shard_name,
    shared_name,
    unseal,
)
from framework.checkpoint.plan import Plan
from framework.checkpoint.record import RecordTemplate
from framework.checkpoint.store import CheckpointStore
from framework.distributed import Group
from framework.errors import CheckpointError, DistributedError
from framework.mounts import Mounted

NO_RENAME = (errno.ENOSYS, errno.EOPNOTSUPP)  # what mounts of object stores answer


IDLE = "idle"  # the phase between two saves


@dataclass(slots=True)
class Save:
    """One save of this rank, staged.

    Args:
        header: What the checkpoint says about itself.
        tag: What its file names carry.
        plan: Where its tensors lie.
        captured: Wall clock of the state.
        shards: Bytes of the shard files, by name.
        objects: Bytes of the files with Python values, by name.
        error: What already went wrong on this rank.
        stall_seconds: How long the step loop was held up.
        staged: Monotonic clock at the end of that.
    """

    header: SaveHeader
    tag: str
    plan: Plan
    captured: float
    shards: dict[str, memoryview] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    error: str | None = None
    stall_seconds: float = 0.0
    staged: float = 0.0


@dataclass(frozen=True, slots=True)
class _Report:
    """What one rank has written."""

    error: str | None
    files: dict[str, FileRecord]
    stall_seconds: float


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What rank 0 tells all: the result, and whether `.metadata` refers to the files now."""

    result: SaveResult
    is_published: bool


class Committer:
    """Writes and publishes saves, one after the other.

    Args:
        store: Where to.
        group: For the agreement; used by nothing else while a save is under way.
        run: Name of the run.
        attempt: Number of this attempt.
        token: Its fencing token.
        is_owner: Whether this attempt still owns the run; asked on rank 0.
    """

    def __init__(
        self,
        store: CheckpointStore,
        group: Group,
        *,
        run: str,
        attempt: int,
        token: str,
        is_owner: Callable[[], bool],
    ) -> None:
        self.store = store
        self.group = group
        self.run = run
        self.attempt = attempt
        self.token = token
        self.is_owner = is_owner
        self.mounted = Mounted(store.path)
        self.phase = IDLE
        self.sees: Callable[[int], bool] = _sees_all  # on rank 0: whether it sees the files of a rank
        self._template: RecordTemplate | None = None

    def use(self, plan: Plan) -> None:
        """Makes the record of a new plan ahead of its first save."""
        if self.group.world.is_main:
            self._template = RecordTemplate(plan)
            self._template.fill(make_tag(self.attempt, self.token, 0))

    def persist(self, save: Save) -> SaveResult:
        """Writes this rank's files, agrees with the others, publishes. A collective; raises nothing."""
        folder = self.store.folder(save.header.step)
        report = self._write(save, folder)
        outcome = None
        try:
            self.phase = f"waiting for what the other ranks have written of step {save.header.step}"
            self.group.together(f"saving step {save.header.step}", self.group.timeout_seconds)
            reports = self.group.all_gather(report)
            if self.group.world.is_main:
                self.phase = f"publishing {folder}"
                outcome = self._publish(save, folder, reports)
            self.phase = f"waiting for rank 0 to publish {folder}"
            outcome = self.group.broadcast(outcome)
        except DistributedError as error:
            # a rank that does not know whether rank 0 published leaves its files where they are: the next sweep does
            if outcome is None:
                return _failed(save, folder, f"{report.error or error}")
        assert outcome is not None
        if not outcome.is_published:
            self._discard(save, folder)
        self.phase = IDLE
        return outcome.result

    def _write(self, save: Save, folder: Path) -> _Report:
        self.phase = f"writing to {folder}"
        written: dict[str, FileRecord] = {}
        error = save.error
        if error is None:
            try:
                _check_readable(save)
                self.mounted.check()
                folder.mkdir(parents=True, exist_ok=True)
                everything: dict[str, bytes | memoryview] = {**save.shards, **save.objects}
                for name, data in everything.items():
                    written[name] = files.create(folder / name, data)
                files.sync_folder(folder)
            except CheckpointError as problem:
                error = str(problem)
            except Exception as problem:  # every rank must hear of it, whatever it is
                error = f"{folder}: {problem}"
        return _Report(error, written, save.stall_seconds)

    def _publish(self, save: Save, folder: Path, reports: list[_Report]) -> _Outcome:
        """Rank 0: compares with the plan, writes the manifest, publishes."""
        error = None
        is_published = False
        try:
            self._compare(save, folder, reports)
            temporary = self._seal(save, folder, reports)
            if not self.is_owner():
                raise CheckpointError(
                    f"superseded: another attempt owns the run now, so attempt {self.attempt} does not publish {folder}"
                )
            if all(self.sees(rank) for rank in range(len(reports))):
                publish(temporary, folder / METADATA)
            is_published = True
            for place in (folder, self.store.path, self.store.path.parent):
                files.sync_folder(place)
        except files.DamagedError as problem:  # names the file alone
            error = f"{folder}: {problem}"
        except CheckpointError as problem:
            error = str(problem)
        except Exception as problem:  # every rank must hear of it, whatever it is
            error = f"{folder} could not be published: {problem}"
        is_published = is_published or _is_named(folder, save.tag)  # an error does not prove that there was no rename
        size = sum(record.size for report in reports for record in report.files.values())
        stall = max(report.stall_seconds for report in reports)
        seconds = time.monotonic() - save.staged
        step = save.header.step
        is_local = error is None and os.path.lexists(folder / METADATA)
        result = SaveResult(step, folder, error is None, error, size, stall, seconds, save.captured, local=is_local)
        return _Outcome(result, is_published)

    def _compare(self, save: Save, folder: Path, reports: list[_Report]) -> None:
        """Every file of the plan, and nothing else, was written in full by its rank and is there now."""
        if errors := [f"rank {rank}: {report.error}" for rank, report in enumerate(reports) if report.error]:
            raise CheckpointError("; ".join(errors))
        for rank, report in enumerate(reports):
            sizes = save.plan.layouts[rank].sizes
            planned: dict[str, int | None] = {shard_name(rank, n, save.tag): size for n, size in enumerate(sizes)}
            planned[rank_name(rank, save.tag)] = None  # of Python values only the names are known
            if rank == 0:
                planned[shared_name(save.tag)] = None
            written = {name: report.files[name].size if size is not None else None for name, size in planned.items()
                       if name in report.files}  # fmt: skip
            if planned != written or len(report.files) != len(planned):
                raise CheckpointError(
                    f"rank {rank} wrote {', '.join(f'{n} ({r.size:,} bytes)' for n, r in report.files.items())} "
                    f"into {folder}, but the plan says {', '.join(planned)} with {sum(sizes):,} bytes of tensors"
                )
            if self.sees(rank):
                for name, record in report.files.items():
                    files.check_size(folder / name, record)

    def _seal(self, save: Save, folder: Path, reports: list[_Report]) -> Path:
        """Writes the manifest, and `.metadata` under a temporary name."""
        assert self._template is not None
        header = save.header
        name = manifest_name(save.tag)
        data = Manifest(
            run=self.run,
            attempt=self.attempt,
            token=self.token,
            step=header.step,
            position=header.position,
            epoch=header.epoch,
            skipped=header.skipped,
            world_size=self.group.world.size,
            threads=torch.get_num_threads(),
            versions={"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__},
            reason=header.reason,
            metrics=dict(header.metrics),
            created=save.captured,
            files={name: record for report in reports for name, record in report.files.items()},
            rank_files={rank: rank_name(rank, save.tag) for rank in range(len(reports))},
            shared_file=shared_name(save.tag),
            elapsed_seconds=header.elapsed_seconds,
            finished=header.finished,
            health=header.health,
            pinned=header.pinned,
            unknown=dict(header.extra),
        ).to_bytes()
        files.create(folder / name, data)
        temporary = folder / unpublished_name(save.tag)
        files.create(temporary, seal(self._template.fill(save.tag), name, data))
        files.sync_folder(folder)
        return temporary

    def _discard(self, save: Save, folder: Path) -> None:
        """Removes this rank's files of a save that is not published, as far as that works."""
        names = [*save.shards, *save.objects]
        if self.group.world.is_main:
            names += [manifest_name(save.tag), unpublished_name(save.tag)]
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(folder / name)
        with contextlib.suppress(OSError):  # only an empty folder goes
            os.rmdir(folder)


def unpublished_name(tag: str) -> str:
    """What `.metadata` is called before its files are a checkpoint."""
    return f"{METADATA}.{tag}.tmp"


def publish(temporary: Path, target: Path) -> None:
    """Gives a durable file its name. Readers see all of it or what was there before.

    Mounts of object stores have no rename: there the bytes are written anew, in one exclusive write. What had that name
    has to go first; only a second save of one step finds something.

    Raises:
        OSError: It has not got its name.
    """
    try:
        os.replace(temporary, target)
    except OSError as error:
        if error.errno not in NO_RENAME:
            raise
        data = files.read(temporary)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        try:
            files.create(target, data)
        except CheckpointError:
            with contextlib.suppress(OSError):
                os.unlink(target)
            raise
        os.unlink(temporary)


def _is_named(folder: Path, tag: str) -> bool:
    """Whether the published `.metadata` is that of a save."""
    try:
        return unseal(files.read(folder / METADATA))[1].manifest == manifest_name(tag)
    except CheckpointError:
        return False


def _sees_all(rank: int) -> bool:
    return True


def _failed(save: Save, folder: Path, error: str) -> SaveResult:
    seconds = time.monotonic() - save.staged
    return SaveResult(save.header.step, folder, False, error, 0, save.stall_seconds, seconds, save.captured)


def _check_readable(save: Save) -> None:
    """What could be written but not read again is an error now, not at the restart."""
    for name, data in save.objects.items():
        load_values(name, data)


def dump_values(values: Any) -> bytes:
    """Python values as torch.save writes them."""
    buffer = io.BytesIO()
    torch.save(dict(values), buffer)
    return buffer.getvalue()


def load_values(name: str, data: bytes) -> dict[str, Any]:
    """Python values, without running code.

    Raises:
        DamagedError: They are none, or there is something in them that no save of a run puts there.
        CheckpointError: There is a class in them that the user's code knows, and a restricted load refuses.
    """
    part = "rank" if name.startswith("rank") else "shared"
    try:
        values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch raises anything here
        kind = CheckpointError if _is_of_user(data) else DamagedError
        raise kind(
            f"{name}: the {part} part of the state holds something that is not loaded without running code: "
            f"{_first_lines(str(error))} Use numbers, strings, lists, dicts and tensors."
        ) from error
    if not isinstance(values, dict):
        raise DamagedError(f"{name} holds a {type(values).__name__} instead of a dict.")
    return values


def _is_of_user(data: bytes) -> bool:
    """Whether all that is refused in saved values are classes of modules that are loaded, other than Python's own.

    Nothing is imported and nothing is called for it.
    """
    try:
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # no archive of torch's
        return False
    return bool(refused) and all(map(_is_own_class, refused))


def _is_own_class(name: str) -> bool:
    module, _, last = name.rpartition(".")
    is_own = module in sys.modules and module.partition(".")[0] not in {*sys.stdlib_module_names, "builtins"}
    return is_own and isinstance(vars(sys.modules[module]).get(last), type)


def _first_lines(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if "WeightsUnpickler" in line or "GLOBAL" in line) or (
        text.splitlines()[0] if text else "no reason given."
    )
