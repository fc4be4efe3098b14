"""The metrics of a run as an event file of TensorBoard. Needs `tensorboard`, neither torch nor TensorFlow.

Guarantee: each metric has one point a step, however often the run was restarted: an attempt writes the curves anew from
the journal, tells a TensorBoard that is looking to drop what it has (a session start at step 0), and then removes the
files of earlier attempts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import time
from collections.abc import Iterable
from pathlib import Path

from framework.errors import ConfigError
from framework.goodput.tracking.points import Point


def check_installed() -> None:
    """Raises:
    ConfigError: `tensorboard` is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "TensorBoard is not installed, and its event files are written with it: "
            "pip install 'goodput-framework[tensorboard]'"
        )


class TensorBoardLog:
    """Writes one event file.

    Args:
        folder: Where to; it is made. Other event files directly in it are removed by `publish`.

    Raises:
        ConfigError: `tensorboard` is not installed.
    """

    def __init__(self, folder: Path) -> None:
        check_installed()
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._old = sorted(folder.glob("events.out.tfevents.*"))
        self._writer = EventFileWriter(str(folder))
        self._writer.add_event(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))

    def add(self, points: Iterable[Point], complete: int) -> None:
        """Takes points, whether their step is complete or not."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for (step, timestamp), group in itertools.groupby(points, lambda point: (point.step, point.timestamp)):
            values = [Summary.Value(tag=point.key, simple_value=point.value) for point in group]
            self._writer.add_event(Event(wall_time=timestamp / 1000, step=step, summary=Summary(value=values)))

    def publish(self) -> None:
        """What earlier attempts wrote is all in the new file by now: removes theirs."""
        self._writer.flush()
        for file in self._old:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
