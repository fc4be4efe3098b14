"""Starts the exporter beside a training process, and waits for it at the end. Imports neither torch nor MLflow.

Guarantee: starting returns at once; nothing here waits for a tracking server, and the wait at the end is bounded. The
exporter holds none of the trainer's streams open, is not reached by Ctrl-C, and outlives the trainer, however that
ends, just long enough to send the rest and the final status.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import framework
from framework.goodput.tracking.names import check_uri as check_uri
from framework.goodput.tracking.names import default_uri as default_uri
from framework.goodput.tracking.names import without_password

_left_running: list[subprocess.Popen[str]] = []  # an exporter that lingers must not be reported as forgotten


class ExporterProcess:
    """The exporter of one attempt.

    Args:
        run_dir: The run directory; it must exist, with the run's `config.yaml` in it.
        uri: Tracking URI.
        experiment: Name of the experiment.
        run_name: Name of the MLflow run.
        linger_seconds: How long the exporter may go on after this process has ended.
        say: Called from a thread with each line that the user should see; default prints to stderr.

    Raises:
        ConfigError: MLflow cannot use `uri`.
    """

    def __init__(
        self,
        run_dir: Path | str,
        uri: str,
        experiment: str,
        run_name: str,
        *,
        linger_seconds: float = 30.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._run_dir = Path(run_dir).absolute()
        self._uri = check_uri(uri)
        self._experiment = experiment
        self._run_name = run_name
        self._linger = linger_seconds
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the exporter, none before `start`."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process; its log is `exporter.log` in the run directory.

        Raises:
            OSError: The log cannot be written or the process cannot be started.
        """
        command = [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            "-m",
            "framework.goodput.tracking.exporter",
            str(self._run_dir),
        ]
        command += ["--experiment", self._experiment, "--run-name", self._run_name]
        command += ["--parent-pid", str(os.getpid()), "--linger", str(self._linger)]
        home = str(Path(framework.__file__).resolve().parent.parent)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}
        environment["PYTHONUNBUFFERED"] = "1"
        if without_password(self._uri) == self._uri:
            command += ["--uri", self._uri]
        else:
            environment["MLFLOW_TRACKING_URI"] = self._uri  # a command line can be read by everybody on the host
        with (self._run_dir / "exporter.log").open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._relay, args=(self._process.stderr,), name="exporter", daemon=True)
        self._reader.start()

    def finish(self, timeout_seconds: float = 30.0) -> bool:
        """Waits until the exporter has sent everything. Call it after the journal's `end` event has been written.

        Args:
            timeout_seconds: The longest wait; after it the exporter goes on alone, for its linger time.

        Returns:
            Whether everything is in MLflow.
        """
        if self._process is None:
            return True
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            _left_running.append(self._process)
            return False
        if self._reader is not None:
            self._reader.join(timeout=5)
        return code == 0

    def _relay(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._say(line.rstrip("\n"))
