"""Starts the exporter beside a training process, and waits for it at the end. Imports neither torch nor MLflow.

Guarantee: nothing here waits for a tracking server, and a password in its address is on no command line. The exporter
outlives the trainer, however that ends, just long enough to send the rest and the final status.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from framework.goodput.tracking.names import check_uri as check_uri
from framework.goodput.tracking.names import default_uri as default_uri
from framework.goodput.tracking.names import without_password
from framework.goodput.tracking.side_process import SideProcess


class ExporterProcess(SideProcess):
    """The exporter of one attempt; its log is `exporter.log` in the run directory.

    Args:
        run_dir: The run directory; it must exist, with the run's `config.yaml` in it.
        uri: Tracking URI.
        experiment: Name of the experiment.
        run_name: Name of the MLflow run.
        attempt: Number of the attempt that this process makes.
        system_metrics: Whether the use of this host is sampled: CPU, memory, disk, network, GPUs.
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
        attempt: int | None = None,
        system_metrics: bool = False,
        linger_seconds: float = 30.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        run, uri = Path(run_dir).absolute(), check_uri(uri)
        words = [str(run), "--experiment", experiment, "--run-name", run_name]
        words += ["--parent-pid", str(os.getpid()), "--linger", str(linger_seconds)]
        words += [] if attempt is None else ["--attempt", str(attempt)]
        words += ["--system-metrics"] if system_metrics else []
        environment = {}
        if without_password(uri) == uri:
            words += ["--uri", uri]
        else:
            environment["MLFLOW_TRACKING_URI"] = uri  # a command line can be read by everybody on the host
        log = run / "exporter.log"
        super().__init__("framework.goodput.tracking.exporter", words, log, environment=environment, say=say)
