"""The folder of a run's checkpoints: which there are, and how they leave.

Guarantee: a checkpoint exists when its `.metadata` exists. Deleting unlinks `.metadata` first, so that no half of a
checkpoint is ever listed; it never follows a symbolic link, never touches what was set aside or pinned, and keeps
everything until enough newer ones are there whose manifest and file sizes are right.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from framework.checkpoint import files
from framework.checkpoint.files import DamagedError
from framework.checkpoint.manifest import METADATA, Manifest, attempt_of, unseal
from framework.errors import CheckpointError

if TYPE_CHECKING:
    import torch

DAMAGED = "damaged"
_STEP = re.compile(r"step_(\d{10,})")
_TRASH = ".trash-"
_PROBE = ".probe."  # what the writer's trial file is called
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


class CheckpointStore:
    """The checkpoints of one run. Making this object touches nothing.

    Args:
        path: The folder, `<run>/checkpoints`; it need not exist.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.path / f"step_{step:010d}"

    def list(self) -> list[Found]:
        """The published checkpoints, newest first; damaged ones are among them, with what is wrong.

        Raises:
            CheckpointError: One was written by a later version, or the folder cannot be read.
        """
        return [self.look(folder) for folder, _ in self._folders() if os.path.lexists(folder / METADATA)]

    def look(self, folder: Path) -> Found:
        """One checkpoint, judged by its manifest and the sizes of its files."""
        match = _STEP.fullmatch(folder.name)
        step = int(match[1]) if match else -1
        try:
            return Found(folder, step, header=read_header(folder, step))
        except DamagedError as error:
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

    def retain(self, keep_last: int) -> Paths:
        """Deletes all but the newest checkpoints. Damaged and pinned ones are neither counted nor deleted.

        Args:
            keep_last: How many to keep, at least 1.

        Returns:
            What was deleted.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last} would delete every checkpoint; it must be at least 1")
        good = [f for f in self.list() if f.header is not None and not f.header.pinned]
        old = [f.path for f in good[keep_last:] if not f.path.is_symlink()]
        for folder in old:
            self._delete(folder)
        return old

    def sweep(self, attempt: int) -> Paths:
        """Removes what earlier attempts left unpublished: their part-written files, what was being deleted, and
        the files by which they tried whether they could write.

        Files of this attempt and of later ones, files that a published checkpoint uses, and files that no save of
        ours wrote are left alone.

        Args:
            attempt: Number of this attempt, from 1.

        Returns:
            What was removed.
        """
        removed: Paths = []
        for folder, _ in self._folders():
            if not folder.is_symlink():
                removed += self._sweep_folder(folder, attempt)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self.path):
                if entry.name.startswith(_TRASH) and entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                    removed.append(Path(entry.path))
                elif entry.name.startswith(_PROBE) and entry.is_file(follow_symlinks=False):
                    writer = attempt_of(entry.name)
                    if writer is not None and writer < attempt:
                        os.unlink(entry.path)
                        removed.append(Path(entry.path))
        return removed

    def prune(self, folder: Path, attempt: int) -> None:
        """Removes what earlier saves of the same step left in a published checkpoint."""
        self._sweep_folder(folder, attempt + 1)

    def _sweep_folder(self, folder: Path, attempt: int) -> Paths:
        used: set[str] = set()
        if os.path.lexists(folder / METADATA):
            found = self.look(folder)
            if found.header is None:  # what a damaged checkpoint needs is not known
                return []
            _, seal = unseal(files.read(folder / METADATA))
            used = {seal.manifest, *found.header.files}
        removed: Paths = []
        for entry in [*os.scandir(folder)]:
            writer = attempt_of(entry.name)
            if writer is None or writer >= attempt or entry.name in used or entry.is_dir(follow_symlinks=False):
                continue
            os.unlink(entry.path)
            removed.append(Path(entry.path))
        with contextlib.suppress(OSError):  # only an empty folder goes
            os.rmdir(folder)
        return removed

    def _delete(self, folder: Path) -> None:
        os.unlink(folder / METADATA)
        files.sync_folder(folder)
        trash = self.path / f"{_TRASH}{folder.name}-{uuid.uuid4().hex[:8]}"
        os.rename(folder, trash)
        shutil.rmtree(trash, ignore_errors=True)  # what remains is swept by the next attempt

    def _folders(self) -> Iterator[tuple[Path, int]]:
        """The folders of steps, published or not, newest first."""
        try:
            entries = [(e.name, _STEP.fullmatch(e.name)) for e in os.scandir(self.path) if e.is_dir()]
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read as a folder of checkpoints: {error.strerror}") from error
        for name, match in sorted(entries, key=lambda pair: int(pair[1][1]) if pair[1] else -1, reverse=True):
            if match and self.folder(int(match[1])).name == name:
                yield self.path / name, int(match[1])


def _reason_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.reason.txt")
