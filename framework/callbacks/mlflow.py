"""MLflowCallback: the run in MLflow, without MLflow in the training process.

Guarantee: training never calls a tracking server. A process of its own reads the journal and copies it; a server that
is down or slow costs the training nothing and is caught up with later.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from framework.callback import Callback
from framework.duration import SECONDS, Duration
from framework.goodput.tracking.exporter_process import ExporterProcess
from framework.goodput.tracking.names import check_uri, default_uri, without_password

if TYPE_CHECKING:
    from framework.trainer import Trainer


log = logging.getLogger(__name__)


class MLflowCallback(Callback):
    """Copies parameters, metrics, status and report to one MLflow run over all attempts.

    Args:
        tracking_uri: Where to; default an sqlite file in the folder of all runs.
        experiment: Name of the experiment; default the folder of all runs.
        linger: How long the end of the run waits for the copy to be complete; what is missing can be copied later.
        system_metrics: Whether the use of the host of rank 0 (CPU, memory, disk, network, GPUs) is sampled every 10 s.
    """

    critical = False
    records_failed_build = True

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        linger: str = "30s",
        system_metrics: bool = True,
    ) -> None:
        self._uri = tracking_uri
        if tracking_uri is not None:
            check_uri(tracking_uri)
        self._experiment = experiment
        self._linger = Duration.parse(linger, key="callbacks.mlflow.linger", allow=(SECONDS,)).value
        self._system_metrics = system_metrics
        self._exporter: ExporterProcess | None = None

    def setup(self, trainer: Trainer) -> None:
        if not trainer.world.is_main:
            return
        uri = self._uri or default_uri(trainer.root)
        experiment = self._experiment or trainer.root.resolve().name
        log.info("MLflow: run %s of experiment %s in %s", trainer.name, experiment, without_password(uri))
        self._exporter = ExporterProcess(
            trainer.run.path, uri, experiment, trainer.name, attempt=trainer.attempt or None,
            system_metrics=self._system_metrics,
        )  # fmt: skip
        self._exporter.start()

    def exception(self, trainer: Trainer, error: BaseException) -> None:
        if self._exporter is None:  # the run failed before it was set up
            self.setup(trainer)

    def close(self, trainer: Trainer) -> None:
        if self._exporter is not None:
            log.info("bringing MLflow up to date, for %g s at most", self._linger)
            self._exporter.finish(self._linger)
