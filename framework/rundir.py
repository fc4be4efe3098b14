"""The run directory: where things are, and who owns it.

Guarantee: at most one live process owns a run directory. Ownership is a lease in `owner.json`, renewed every 10 s and
numbered by attempt. A second live run is refused with the owner named; a dead owner on this host is replaced at once,
one on another host after three missed renewals; a writer of an older attempt sees that it lost the lease. Only another
ownership, or another mount in the place of the directory's, takes it away: a file that is deleted, damaged or out of
reach does not, and is written anew. A copy of the directory belongs to nobody; the same directory under another path
belongs to its owner. Paths are those of the moment at which the object was made, whatever becomes the working directory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from framework.errors import ConfigError, RunOwnedError
from framework.mounts import Mounted

RENEW_SECONDS = 10.0
MISSES = 3


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns a run directory, as written in `owner.json`.

    Args:
        host: Host name.
        pid: Process id of rank 0 there.
        started: Start time of that process in seconds since the epoch: tells it from a later one of the same pid.
        attempt: Number of the attempt, from 1.
        token: Unique id of this ownership, the fencing token.
        renewed: Wall clock of the last renewal in seconds, 0 after an orderly release.
        path: The directory, absolute and without links; empty in files of earlier versions, as are the next two.
        device: `st_dev` of the directory.
        inode: `st_ino` of the directory.
    """

    host: str
    pid: int
    started: float
    attempt: int
    token: str
    renewed: float
    path: str = ""
    device: int = 0
    inode: int = 0

    def owns(self, path: Path) -> bool:
        """Whether it is this very directory that is owned, and not the one of which this is a copy.

        What another host says of its mounts is no proof: there, three missed renewals tell a copy.
        """
        if not self.path or self.host != socket.gethostname() or os.path.realpath(path) == self.path:
            return True
        found = os.stat(path)
        return (found.st_dev, found.st_ino) == (self.device, self.inode)

    @property
    def is_live(self) -> bool:
        """Whether the owner still runs, as far as this host can tell."""
        if self.renewed == 0:
            return False
        if self.host != socket.gethostname():
            return time.time() - self.renewed < MISSES * RENEW_SECONDS
        try:
            process = psutil.Process(self.pid)
            # a killed process stays in the table until its parent asks for its exit code, in a container maybe for ever
            return abs(process.create_time() - self.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """The owner that a file names; none if it names none, whatever else it holds."""
        try:
            found = json.loads(text)
            owner = cls(**{field.name: found[field.name] for field in fields(cls) if field.name in found})
        except (ValueError, TypeError, RecursionError):
            return None
        is_sound = (
            isinstance(owner.host, str)
            and isinstance(owner.token, str)
            and isinstance(owner.path, str)
            and all(type(value) is int for value in (owner.pid, owner.attempt, owner.device, owner.inode))
            and owner.pid > 0
            and owner.attempt > 0
            and all(type(value) in (int, float) and math.isfinite(value) for value in (owner.started, owner.renewed))
        )
        return owner if is_sound else None


class RunDirectory:
    """Paths inside one run directory. Making this object touches nothing.

    Args:
        path: The run directory; it need not exist.

    Attributes:
        path: Its absolute path.
        shown: The path as it was given, for messages.
    """

    def __init__(self, path: Path | str) -> None:
        self.shown = Path(path)
        self.path = self.shown.absolute()
        self.config_file = self.path / "config.yaml"
        self.owner_file = self.path / "owner.json"
        self.checkpoints = self.path / "checkpoints"
        self.events = self.path / "events"
        self.mlflow_file = self.path / "mlflow.json"
        self.save_now_file = self.path / "save-now"

    def events_file(self, attempt: int, rank: int) -> Path:
        return self.events / f"att-{attempt:04d}" / f"rank{rank}.jsonl"

    def mark_file(self, attempt: int) -> Path:
        """Where rank 0 keeps the last step that it has done."""
        return self.events / f"att-{attempt:04d}" / "rank0.step"

    def owner(self) -> Owner | None:
        """The last owner, live or not; none if there never was one, or its file cannot be read."""
        try:
            return self._read_owner()
        except OSError:
            return None

    def _read_owner(self) -> Owner | None:
        try:
            return Owner.parse(self.owner_file.read_text(errors="replace"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def refuse_live_owner(self) -> None:
        """Raises:
        RunOwnedError: Another live process owns this directory.
        ConfigError: Who owns it cannot be read."""
        try:
            owner = self._read_owner()
        except OSError as error:
            raise ConfigError(
                f"{self.shown / self.owner_file.name} says who owns the run, and cannot be read: "
                f"{error.strerror or error}. Remove it if no run is live there, or give this run another run.name."
            ) from error
        if owner is not None and owner.is_live and owner.owns(self.path):
            raise RunOwnedError(
                f"{self.shown} belongs to a live run: pid {owner.pid} on {owner.host}, attempt {owner.attempt}. "
                f"Wait for it, stop it, or give this run another run.name."
            )

    def next_attempt(self) -> int:
        """One more than the newest attempt that left a trace here."""
        numbers = [int(p.name[4:]) for p in self.events.glob("att-*") if p.name[4:].isdecimal()]
        owner = self.owner()
        return max([*numbers, owner.attempt if owner else 0], default=0) + 1

    def acquire(self) -> Lease:
        """Makes the directory and takes ownership for this process (rank 0).

        Raises:
            RunOwnedError: Another live process owns it.
            PermissionError: The directory cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path / "owner.lock", timeout=30):
            self.refuse_live_owner()
            me, place = psutil.Process(), os.stat(self.path)
            owner = Owner(
                socket.gethostname(), me.pid, me.create_time(), self.next_attempt(), uuid.uuid4().hex, time.time(),
                os.path.realpath(self.path), place.st_dev, place.st_ino,
            )  # fmt: skip
            _write_json(self.owner_file, asdict(owner))
        return Lease(self, owner)


class Lease:
    """Ownership of a run directory by this process; renewed in the background until released."""

    def __init__(self, run: RunDirectory, owner: Owner) -> None:
        self.run = run
        self.attempt = owner.attempt
        self.token = owner.token
        self._owner = owner
        self._mounted = Mounted(run.path)
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def is_held(self) -> bool:
        """Whether the file names no other ownership, on the mount of the beginning. A writer asks before it publishes.

        Whoever takes the directory over writes a token of its own. A file that is gone, empty or out of reach was taken
        over by nobody; but where the volume is no longer mounted, this is another directory.
        """
        if not self._mounted.is_same():
            return False
        owner = self.run.owner()
        return owner is None or owner.token == self.token

    def release(self) -> None:
        """Gives the directory back; releasing twice, or in a forked child, does nothing."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join(timeout=5)
        if self.is_held():
            self._write(renewed=0.0)

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # a full disk or a mount that is away: the next renewal may work
                owner = self.run.owner()
                if not self._mounted.is_same():  # it may be mounted again
                    continue
                if owner is None:
                    self._restore()
                elif owner.token != self.token:
                    return
                else:
                    self._write(renewed=time.time())

    def _restore(self) -> None:
        """Writes the file anew. Only the lock tells a file that is gone from one that another run is about to write."""
        if not self.run.path.is_dir():  # the lock would make it
            return
        with FileLock(self.run.path / "owner.lock", timeout=RENEW_SECONDS):
            if self.run.owner() is None:
                self._write(renewed=time.time())

    def _write(self, renewed: float) -> None:
        _write_json(self.run.owner_file, asdict(self._owner) | {"renewed": renewed})


def write_whole(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes a file so that whoever reads it sees all of it or what was there before.

    Args:
        path: The file; its folder exists.
        text: What it holds from then on, as UTF-8.
        durable: Whether its content is forced to disk before it gets its name.

    Raises:
        OSError: It could not be written; nothing has changed then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_whole(path, json.dumps(value), durable=False)  # a lease outlives no crash of the machine
