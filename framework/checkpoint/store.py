"""The folder of a run's checkpoints: which there are, and how they leave.

Guarantee: a checkpoint exists when its `.metadata` exists. What cannot be read is an error, and never "there is none".
Deleting unlinks `.metadata` first, so that no half of a checkpoint is ever listed; it never follows a symbolic link,
never touches what is marked or was set aside, and begins only when the newest checkpoint is whole. The writer of an
attempt that was replaced deletes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from framework.checkpoint import files, removal
from framework.checkpoint.files import DamagedError
from framework.checkpoint.manifest import METADATA, Manifest, unseal
from framework.checkpoint.marks import Marks
from framework.checkpoint.removal import Garbage
from framework.checkpoint.retention import Keep, expendable, is_good, unknown_metric
from framework.errors import CheckpointError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

DAMAGED = "damaged"
_STEP = re.compile(r"step_(\d{10,})")
_GONE = (
    errno.ENOTCONN, errno.ESTALE, errno.ENODEV, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
)  # fmt: skip
Paths = list[Path]  # inside the class, `list` is its method


@dataclass(frozen=True, slots=True)
class Found:
    """A published checkpoint.

    Args:
        path: Its folder.
        step: Completed optimizer steps, from the folder's name.
        header: Its manifest; none if that cannot be read.
        damage: What is wrong with it, as far as this was looked at; none if nothing is.
        entries: Shape and dtype of every stored tensor by joined key. Filled by the reader, empty in a listing.
    """

    path: Path
    step: int
    header: Manifest | None = None
    damage: str | None = None
    entries: Mapping[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            CheckpointError: The checkpoint is damaged.
        """
        if self.header is None:
            raise CheckpointError(f"{self.path} is damaged: {self.damage}. Use an older checkpoint.")
        return self.header


def read_header(folder: Path, step: int) -> Manifest:
    """The manifest of a published checkpoint, tied to its `.metadata`; sizes of all files are checked.

    Raises:
        DamagedError: Something is missing, cut off or changed; the message names the file.
    """
    _, seal = unseal(files.read(folder / METADATA))
    data = files.read(folder / seal.manifest)
    if zlib.crc32(data) != seal.manifest_crc32:
        raise DamagedError(f"{seal.manifest} is not the manifest that {METADATA} names (checksum differs)")
    manifest = Manifest.from_bytes(data)
    if manifest.step != step:
        raise DamagedError(f"it holds step {manifest.step}, but its folder is named for step {step}")
    for name, record in manifest.files.items():
        files.check_size(folder / name, record)
    return manifest


Founds = list[Found]


class CheckpointStore:
    """The checkpoints of one run. Making this object touches nothing.

    Args:
        path: The folder, `<run>/checkpoints`; it need not exist.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.marks = Marks(self.path)
        self._was_there = False
        self._told: str | None = None

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.path / f"step_{step:010d}"

    def list(self) -> list[Found]:
        """The published checkpoints, newest first; damaged ones are among them, with what is wrong.

        Raises:
            CheckpointError: One was written by a later version, or the folder cannot be read.
        """
        return [*self.iterate()]

    def iterate(self) -> Iterator[Found]:
        """As `list`, one by one: each is looked at when it is asked for.

        Raises:
            CheckpointError: As `list`.
        """
        for folder, _ in self._folders():
            if _is_published(folder):
                yield self.look(folder)

    def newest(self) -> Found | None:
        """The newest published checkpoint, damaged or not; no other one is looked at.

        Raises:
            CheckpointError: As `list`.
        """
        return next(self.iterate(), None)

    def look(self, folder: Path) -> Found:
        """One checkpoint, judged by its manifest and the sizes of its files.

        Raises:
            CheckpointError: It was written by a later version, or the volume it lies on is gone.
        """
        match = _STEP.fullmatch(folder.name)
        step = int(match[1]) if match else -1
        try:
            return Found(folder, step, header=read_header(folder, step))
        except DamagedError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _GONE:
                raise CheckpointError(f"{folder} is out of reach: {error}. Look at the volume.") from error
            return Found(folder, step, damage=str(error))
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from error

    def set_aside(self, found: Found, reason: str) -> Path:
        """Moves a damaged checkpoint to `damaged/`, beside a file with the reason.

        Returns:
            Where it lies now.
        """
        damaged = self.path / DAMAGED
        damaged.mkdir(exist_ok=True)
        target = damaged / found.path.name
        number = 1
        while os.path.lexists(target) or os.path.lexists(_reason_file(target)):
            number += 1
            target = damaged / f"{found.path.name}-{number}"
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        files.create(_reason_file(target), f"{found.path}\nset aside {now}\n{reason}\n".encode())
        os.rename(found.path, target)
        files.sync_folder(damaged)
        files.sync_folder(self.path)
        return target

    def retain(
        self, keep: Keep | int, *, attempt: int | None = None, is_owner: Callable[[], bool] = lambda: True
    ) -> Paths:
        """Deletes what no rule and no mark keeps. If the newest checkpoint is not whole, nothing is deleted.

        Args:
            keep: The rules; a number is how many of the newest to keep.
            attempt: The attempt that asks. If there is a checkpoint of a later one, nothing is deleted.
            is_owner: Whether the attempt still owns the run; asked before each deletion.

        Returns:
            What was deleted, newest first.

        Raises:
            CheckpointError: The folder cannot be read, or some could not be deleted (those that could be are).
        """
        rules = keep if isinstance(keep, Keep) else Keep(last=keep)
        deleted: Paths = []
        errors = []
        for found in self.expendable(rules, attempt):
            try:
                outcome = self.delete(found, is_owner)
            except OSError as error:
                errors.append(f"{found.path} could not be deleted: {error.strerror or error}")
                continue
            if outcome is None:
                log.warning("another attempt owns the run now: this one deletes no more checkpoints of %s", self.path)
                break
            if outcome:
                deleted.append(found.path)
        if errors:
            raise CheckpointError("; ".join(errors))
        return deleted

    def expendable(self, keep: Keep, attempt: int | None = None) -> Founds:
        """What `retain` would delete, newest first.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        found = self.list()
        if not found:
            return []
        if not is_good(found[0]):
            log.warning("nothing is deleted: the newest checkpoint, %s, is damaged: %s", found[0].path, found[0].damage)
            return []
        attempts = [one.manifest.attempt for one in found if is_good(one)]
        if attempt is not None and max(attempts) > attempt:
            log.warning("%s has checkpoints of attempt %d: attempt %d deletes none", self.path, max(attempts), attempt)
            return []
        problem = unknown_metric(found, keep)
        if problem is not None and problem != self._told:
            log.warning("%s", problem)
        self._told = problem
        going = expendable(found, keep, protected=self.marks.protected(attempts))
        return [one for one in going if not one.path.is_symlink()]

    def sweep(self, attempt: int | None) -> Paths:
        """Removes what earlier attempts left unpublished: their part-written files, what was being deleted or copied,
        and the files by which they tried whether they could write.

        Files of this attempt and of later ones, files that a published checkpoint uses, and files that no save of
        ours wrote are left alone. What cannot be removed is only warned about.

        Args:
            attempt: Number of this attempt, from 1; none: no attempt runs, and every save is an earlier one.

        Returns:
            What was removed.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        removed = [one.path for one in self.left_overs(attempt) if removal.remove(one.path)]
        for folder, _ in self._folders():
            if not folder.is_symlink() and not _is_published(folder):
                with contextlib.suppress(OSError):  # only an empty folder goes
                    os.rmdir(folder)
        return removed

    def left_overs(self, attempt: int | None) -> Iterator[Garbage]:
        """What `sweep` would remove.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        for folder, _ in self._folders():
            if not folder.is_symlink():
                yield from self._left_in(folder, attempt)
        try:
            yield from removal.left_beside(self.path, attempt)
        except OSError as error:
            raise self._unreadable(error) from error

    def prune(self, folder: Path, attempt: int) -> None:
        """Removes what earlier saves of the same step left in a published checkpoint."""
        for one in self._left_in(folder, attempt + 1):
            removal.remove(one.path)

    def pin(self, step: int) -> None:
        """Keeps a checkpoint until it is unpinned.

        Raises:
            CheckpointError: There is no such checkpoint, or the mark cannot be written.
        """
        self.marks.pin(step)

    def unpin(self, step: int) -> bool:
        """Takes a pin away, and says whether there was one.

        Raises:
            CheckpointError: The pin is part of the sealed checkpoint, or the mark cannot be removed.
        """
        was_pinned = self.marks.unpin(step)
        folder = self.folder(step)
        header = self.look(folder).header if _is_published(folder) else None
        if header is not None and header.pinned:
            raise CheckpointError(
                f"{folder} was saved as pinned, which is part of its sealed manifest. To get rid of it, delete it by hand."
            )
        return was_pinned

    def pinned(self) -> frozenset[int]:
        """The steps that are pinned by a mark. Those saved as pinned say so in their manifest."""
        return self.marks.pinned()

    def lease(self, step: int) -> AbstractContextManager[None]:
        """Keeps a checkpoint from retention for as long as a reader is in the block.

        Raises:
            CheckpointError: There is no such checkpoint any more.
        """
        return self.marks.lease(step)

    def note_resumed(self, step: int, attempt: int) -> None:
        """Keeps what this attempt has resumed from until it has published a checkpoint of its own."""
        self.marks.note_resumed(step, attempt)

    def delete(self, found: Found, is_owner: Callable[[], bool]) -> bool | None:
        """Deletes one checkpoint. Whether it was: not if it was marked meanwhile. None: this attempt may delete no more.

        Raises:
            OSError: It could not be deleted.
        """
        with self.marks.exclusive():
            if not is_owner():
                return None
            if found.step in self.marks.pinned() | self.marks.leased():
                return False
            try:
                removal.unpublish(found.path)
            except FileNotFoundError:  # somebody else deletes it
                return False
        removal.discard(found.path)
        return True

    def _left_in(self, folder: Path, attempt: int | None) -> Iterator[Garbage]:
        used: set[str] = set()
        if _is_published(folder):
            found = self.look(folder)
            if found.header is None:  # what a damaged checkpoint needs is not known
                return
            _, seal = unseal(files.read(folder / METADATA))
            used = {METADATA, seal.manifest, *found.header.files}
        try:
            yield from removal.left_in(folder, attempt, used)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error

    def _folders(self) -> Iterator[tuple[Path, int]]:
        """The folders of steps, published or not, newest first."""
        try:
            with os.scandir(self.path) as scan:
                entries = [(e.name, _STEP.fullmatch(e.name)) for e in scan if e.name.startswith("step_") and e.is_dir()]
            self._was_there = True
        except FileNotFoundError as error:
            if self._was_there:
                raise CheckpointError(f"{self.path} is gone: it was there before. Look at the volume.") from error
            return
        except OSError as error:
            raise self._unreadable(error) from error
        for name, match in sorted(entries, key=lambda pair: int(pair[1][1]) if pair[1] else -1, reverse=True):
            if match and self.folder(int(match[1])).name == name:
                yield self.path / name, int(match[1])

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read as a folder of checkpoints: {error.strerror or error}")


def _is_published(folder: Path) -> bool:
    """Whether `.metadata` is there.

    Raises:
        CheckpointError: That cannot be told.
    """
    try:
        os.lstat(folder / METADATA)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror or error}. Look at its permissions."
        ) from error
    return True


def _reason_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.reason.txt")
