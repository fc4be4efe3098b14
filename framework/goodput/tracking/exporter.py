"""Copies the journal of a run to MLflow, from a process of its own.

    python -m framework.goodput.tracking.exporter RUN_DIR --uri URI --experiment NAME --run-name NAME --parent-pid PID

Guarantee: the training process is never held up; the journal is the truth and MLflow a copy of it. Every point gets
there once, also after a kill -9 of this process: what has been copied is noted in `mlflow.json` after the server took
it, and what is sent again is bit for bit what was sent before, which MLflow keeps once. A server that is away costs
one line of warning; what it missed is sent when it is back. The process outlives its parent by at most the linger
time, even if a call of MLflow hangs. The run's status is FINISHED, FAILED or KILLED once it is over.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from framework.errors import ConfigError
from framework.goodput.tracking.mlflow_run import METRICS_PER_CALL, ExportState, MlflowRun
from framework.goodput.tracking.names import DEFAULT_EXPERIMENT, check_uri, default_uri, without_password
from framework.goodput.tracking.points import Point, PointMaker
from framework.goodput.tracking.side_process import stand_aside
from framework.goodput.tracking.system_metrics import SystemSampler
from framework.goodput.tracking.tail import JournalTail, run_with_journal
from framework.goodput.tracking.watch import Watch
from framework.rundir import RunDirectory

POLL_SECONDS = 0.5
LINGER_SECONDS = 30.0
_FIRST_TIMEOUT, _LAST_TIMEOUT = 5, 60  # of one HTTP request, seconds


@dataclass(slots=True)
class _Waiting:
    """What has been read but not sent yet."""

    points: list[Point] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    cursor: tuple[int, int] | None = None


class Exporter:
    """Copies one run.

    Args:
        run: The run directory.
        target: The MLflow run to copy to.
        watch: Knows whether the training process lives, and warns.
        number: The attempt that the training process makes; the end of an earlier one is not its end. None if that is
            not known: then the process id tells.
        sampler: Samples the use of this host while the training process lives.
    """

    def __init__(
        self,
        run: RunDirectory,
        target: MlflowRun,
        watch: Watch,
        number: int | None = None,
        sampler: SystemSampler | None = None,
    ) -> None:
        self._run = run
        self._target = target
        self._watch = watch
        self._number = number
        self._sampler = sampler
        self._status = ""
        self._begin()

    def follow(self) -> bool:
        """Copies until the run is over and everything has been sent, or the linger time is up.

        Returns:
            Whether everything is in MLflow.
        """
        delay, retry_at = 1.0, 0.0
        while True:
            is_gone = self._watch.parent_is_gone()  # asked first: what the parent wrote before it ended is read below
            if time.monotonic() >= retry_at:
                try:
                    with self._watch.call():
                        if self._round(is_gone):
                            return True
                    delay = 1.0
                except Exception as error:  # MLflow raises its own, requests', SQLAlchemy's and the system's errors
                    self._watch.failed(error)
                    _allow_more_time(error)
                    retry_at = time.monotonic() + (min(delay, 2.0) if is_gone else delay)
                    delay = min(2 * delay, 30.0)
            if self._watch.is_time_up() or (is_gone and self._watch.is_failing and self._is_followed()):
                return False
            self._watch.pause(POLL_SECONDS)

    def _begin(self) -> None:
        self._tail = JournalTail(self._run.events)
        self._maker = PointMaker()
        self._waiting = _Waiting()
        self._attempt, self._pid = 0, None
        self._end: Mapping[str, Any] | None = None
        self._last = 0.0

    def _round(self, is_gone: bool) -> bool:
        """Copies what is new. Returns whether there is nothing to come."""
        if not self._target.is_connected:
            self._target.connect(self._watch.alive)
            self._begin()  # where to go on is only known now
            if not is_gone:
                self._target.set_status("RUNNING", None)
                self._status = "RUNNING"
        self._flush()
        for event in self._tail.read():
            self._take(event)
            if len(self._waiting.points) >= METRICS_PER_CALL:
                self._flush()
        status = self._status_now(is_gone)
        is_over = status != "RUNNING" or is_gone
        if self._sampler is not None:
            self._sampler.stop() if is_over else self._sampler.keep_running(self._target.state.run_id)
        if status != "RUNNING":
            self._waiting.points.extend(self._maker.rest())
            self._target.log_config()
        self._flush()
        if status != self._status:
            self._target.set_status(status, self._last or None)
            self._status = status
        if is_over:
            self._target.log_report(self._watch.alive)
        return is_over

    def _take(self, event: Mapping[str, Any]) -> None:
        self._watch.alive()
        if event["ev"] == "attempt_start":
            self._pid = event.get("pid")
        if event["att"] > self._attempt:
            self._attempt, self._end = event["att"], None
        if event["ev"] == "end":
            self._end = event
        self._last = max(self._last, event["t"])
        update = self._maker.feed(event)
        number = event.get("seq")
        cursor = (event["att"], number if type(number) is int else -1)
        if cursor > self._target.state.cursor:
            self._waiting.points += update.points
            self._waiting.tags |= update.tags
            self._waiting.cursor = cursor

    def _flush(self) -> None:
        waiting = self._waiting
        while waiting.points or waiting.tags:
            self._target.log(waiting.points[:METRICS_PER_CALL], waiting.tags)
            self._watch.alive()
            del waiting.points[:METRICS_PER_CALL]
            waiting.tags.clear()
        if waiting.cursor is not None:
            self._target.advance(*waiting.cursor)
            waiting.cursor = None

    def _status_now(self, is_gone: bool) -> str:
        if self._end is not None and (is_gone or self._is_of_parent()):
            return final_status(self._end)
        if not is_gone:
            return "RUNNING"
        owner = self._run.owner()
        is_next = owner is not None and owner.attempt >= self._attempt and owner.is_live
        return "RUNNING" if is_next else "KILLED"

    def _is_followed(self) -> bool:
        """Whether a later attempt has begun: its exporter copies what this one cannot, maybe to another server."""
        owner = self._run.owner()
        return owner is not None and owner.attempt > max(self._attempt, self._number or 0)

    def _is_of_parent(self) -> bool:
        """Whether the newest attempt is the one that the training process makes.

        In a container each attempt may have the same process id, and one process may make several attempts.
        """
        return self._pid == self._watch.parent if self._number is None else self._attempt >= self._number


def final_status(end: Mapping[str, Any]) -> str:
    """MLflow's word for how an attempt ended: FINISHED, FAILED or KILLED.

    A run that was stopped on request is done; one that a signal stopped was killed, even though it saved first.
    """
    status = end.get("status")
    if status == "finished" or (status == "stopped" and end.get("exit_code") == 0):
        return "FINISHED"
    return "FAILED" if status == "failed" else "KILLED"


def export(
    run_dir: Path | str, uri: str | None = None, experiment: str | None = None, run_name: str | None = None
) -> bool:
    """Copies to MLflow what is not there yet, once, without waiting for more.

    Args:
        run_dir: The run directory.
        uri: Tracking URI; default the one in `mlflow.json`, else the sqlite file beside the run directory.
        experiment: Default likewise.
        run_name: Default likewise, else the name of the run directory.

    Returns:
        Whether everything is in MLflow now; if not, a line on stderr said why.

    Raises:
        ConfigError: There is no journal, the address cannot be used, or another exporter is at work.
    """
    run = run_with_journal(run_dir)
    state = ExportState.read(run.mlflow_file)
    if state is not None:
        uri, experiment, run_name = (
            uri or state.tracking_uri,
            experiment or state.experiment,
            run_name or state.run_name,
        )
        if ":***@" in uri:
            raise ConfigError("The address in mlflow.json is kept without its password. Give it with --uri.")
    uri = check_uri(uri or default_uri(run.path.absolute().parent))
    _prepare_mlflow()
    target = MlflowRun(run, uri, experiment or DEFAULT_EXPERIMENT, run_name or run.path.absolute().name)
    watch = Watch(without_password(uri), None, 10.0)
    try:
        with _single(run, 0.0), watch:
            return Exporter(run, target, watch).follow()
    except Timeout:
        raise ConfigError(f"{run.path} is being exported by another process at this moment.") from None


def main(argv: Sequence[str] | None = None) -> int:
    """The exporter process. Returns 0 if everything is in MLflow, 1 if something is left, 2 for a wrong address."""
    parser = argparse.ArgumentParser(
        prog="python -m framework.goodput.tracking.exporter", description=__doc__.split("\n")[0]
    )  # type: ignore[union-attr]
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--uri", default=os.environ.get("MLFLOW_TRACKING_URI"), help="default: $MLFLOW_TRACKING_URI")
    parser.add_argument("--experiment", default=DEFAULT_EXPERIMENT)
    parser.add_argument("--run-name")
    parser.add_argument("--parent-pid", type=int, required=True, help="the training process, rank 0")
    parser.add_argument("--attempt", type=int, help="the attempt that this process makes")
    parser.add_argument(
        "--system-metrics", action="store_true", help="sample CPU, memory, network and GPUs of this host"
    )
    parser.add_argument("--linger", type=float, default=LINGER_SECONDS, help="seconds to go on after the parent ended")
    args = parser.parse_args(argv)
    run = RunDirectory(args.run_dir.absolute())
    console = _quiet()
    try:
        uri = check_uri(args.uri or default_uri(run.path.parent))
    except ConfigError as error:
        print(f"error: {error}", file=console, flush=True)
        return 2
    _prepare_mlflow()
    target_of = (uri, args.experiment, args.run_name or run.path.name)
    with Watch(without_password(uri), args.parent_pid, args.linger, console) as watch:
        while True:
            try:
                with _single(run, POLL_SECONDS):
                    target = MlflowRun(run, *target_of)
                    sampler = SystemSampler(uri, target.started()) if args.system_metrics else None
                    return 0 if Exporter(run, target, watch, args.attempt, sampler).follow() else 1
            except Timeout:  # the exporter of the attempt before still lingers
                if watch.is_time_up():
                    return 1


def _single(run: RunDirectory, timeout: float) -> Any:
    """One exporter at a time copies a run; the lock ends with its process."""
    run.path.mkdir(parents=True, exist_ok=True)
    return FileLock(run.path / ".mlflow.lock", timeout=timeout)


def _quiet() -> Any:
    """Sends whatever libraries print to the log (stdout). Returns a stream to the console for our own words."""
    stand_aside()
    console = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace")
    sys.stdout.flush()
    os.dup2(1, 2)
    return console


def _prepare_mlflow() -> None:
    """Settings that MLflow reads from the environment; what the user has set stays."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_FIRST_TIMEOUT))
    for name, value in {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # by default 7 with back-off: minutes of silence
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        "OMP_NUM_THREADS": "1",
    }.items():
        os.environ.setdefault(name, value)
    import logging

    import mlflow  # noqa: F401 - takes a second or more, which is not the server's

    for logger in ("alembic", "mlflow", "sqlalchemy", "urllib3"):
        logging.getLogger(logger).setLevel(logging.ERROR)


def _allow_more_time(error: BaseException) -> None:
    """A server that is slow, not away, is given more time for each request."""
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        now = int(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"])
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(now, min(2 * now, _LAST_TIMEOUT)))


if __name__ == "__main__":
    sys.exit(main())
