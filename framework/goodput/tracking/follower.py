"""Copies the metrics of a run to files, from a process of its own.

    python -m framework.goodput.tracking.follower RUN_DIR (--csv FILE | --tensorboard DIR) --parent-pid PID

Guarantee: the training process is never held up. The file is a function of the journal: written anew at the beginning,
then kept up, so that a restart leaves no step twice and a kill at any moment nothing that the next attempt does not put
right. A disk that is full costs a line of warning, and the file is made once there is room.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from framework.errors import ConfigError
from framework.goodput.accounts.ledger import MALFORMED
from framework.goodput.tracking.csv_table import CsvTable
from framework.goodput.tracking.points import Point, PointMaker
from framework.goodput.tracking.side_process import stand_aside
from framework.goodput.tracking.tail import JournalTail, run_with_journal
from framework.goodput.tracking.tensorboard_log import TensorBoardLog
from framework.goodput.tracking.watch import is_alive, process_of
from framework.rundir import RunDirectory

POLL_SECONDS = 1.0
RETRY_SECONDS = 10.0
LOCK_SECONDS = 60.0


class Sink(Protocol):
    """Where metrics go to."""

    def add(self, points: Iterable[Point], complete: int) -> None: ...
    def publish(self) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Follower:
    """Copies one run to one sink, from the beginning.

    Args:
        run: The run directory.
        sink: Where to.
    """

    def __init__(self, run: RunDirectory, sink: Sink) -> None:
        self._tail = JournalTail(run.events)
        self._maker = PointMaker()
        self._sink = sink
        self._newest, self._complete = -1, -1
        self._ended = 0  # the newest attempt whose end was read

    def catch_up(self) -> None:
        """Takes everything that is in the journal by now."""
        for event in self._tail.read():
            if event["ev"] == "steps":  # accounts and evaluations of a step may follow until the next ones come
                self._complete = max(self._complete, self._newest)
                with contextlib.suppress(*MALFORMED):
                    self._newest = int(event["first"]) + len(event.get("loss") or []) - 1
            elif event["ev"] == "end":
                self._ended = int(event["att"])
            self._sink.add(self._maker.feed(event).points, self._complete)

    def follow(self, is_gone: Callable[[], bool], attempt: int) -> None:
        """Copies until this attempt has ended or its process is gone.

        Raises:
            OSError: The sink cannot be written.
        """
        self.catch_up()
        self._sink.publish()
        while True:
            was_gone = is_gone()  # asked first: what the process wrote before it ended is read below
            self.catch_up()
            if was_gone or self._ended >= attempt:
                break
            self._sink.flush()
            time.sleep(POLL_SECONDS)
        self.finish()

    def finish(self) -> None:
        """Takes what was held back, and closes the sink."""
        self._sink.add(self._maker.rest(), self._complete)
        self._sink.close()


def copy(run_dir: Path | str, make: Callable[[Path], Sink], target: Path) -> None:
    """Copies what is in the journal, once.

    Args:
        run_dir: The run directory.
        make: `CsvTable` or `TensorBoardLog`.
        target: The file or folder.

    Raises:
        ConfigError: There is no journal, or another process keeps that file.
        OSError: It cannot be written.
    """
    run = run_with_journal(run_dir)
    try:
        with _single(target, 0.0):
            sink = make(target)
            follower = Follower(run, sink)
            follower.catch_up()
            sink.publish()
            follower.finish()
    except Timeout:
        raise ConfigError(f"{target} is kept by another process at this moment: the run is live.") from None


def main(argv: Sequence[str] | None = None) -> int:
    """The process. Returns 0 if everything is there, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m framework.goodput.tracking.follower")
    parser.add_argument("run_dir", type=Path)
    sinks = parser.add_mutually_exclusive_group(required=True)
    sinks.add_argument("--csv", type=Path, help="file to write")
    sinks.add_argument("--tensorboard", type=Path, help="folder to write to")
    parser.add_argument("--parent-pid", type=int, required=True, help="the training process, rank 0")
    parser.add_argument("--attempt", type=int, required=True, help="the attempt that it makes")
    arguments = parser.parse_args(argv)
    stand_aside()
    target = (arguments.csv or arguments.tensorboard).absolute()
    make: Callable[[Path], Sink] = CsvTable if arguments.csv else TensorBoardLog
    process = process_of(arguments.parent_pid)
    run, has_warned = RunDirectory(arguments.run_dir), False
    while True:
        is_last = not is_alive(process)
        try:
            with _single(target, LOCK_SECONDS):  # the process of the attempt before may still be at it
                Follower(run, make(target)).follow(lambda: not is_alive(process), arguments.attempt)
            return 0
        except (OSError, Timeout) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            if not has_warned:
                has_warned = True
                _warn(target, error)
            if is_last:
                return 1
            time.sleep(RETRY_SECONDS)


def _single(target: Path, timeout: float) -> Any:
    """One process at a time keeps a file; the lock ends with its process."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(target.with_name(f".{target.name}.lock"), timeout=timeout)


def _warn(target: Path, error: Exception) -> None:
    text = (
        f"warning: {target} cannot be kept up: {error}. Training goes on, and all metrics are in the run's events/. "
        f"Make it later with: python -m framework.goodput export RUN --csv FILE or --tensorboard DIR"
    )
    with contextlib.suppress(OSError, ValueError):  # nobody may be listening any more
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
