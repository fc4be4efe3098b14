"""How long a loop waited for its data, for loaders that are used without the trainer.

Guarantee: reporting never stops a loop, and what goes to a tracking server never slows it: it is sent from a thread, and
what cannot be sent is dropped, with one warning.
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from framework.data.stats import DataStats
from framework.ending import Background
from framework.errors import ConfigError

EVERY = 50  # batches
MOST_WAITING = 16  # reports for a server that does not answer
CLOSE_SECONDS = 5.0
MLFLOW = "mlflow"

Values = dict[str, float]
Sink = Callable[[Values, int], object]

log = logging.getLogger(__name__)


class Reporter:
    """Adds up what a loop waited, and reports it every `EVERY` batches.

    Args:
        metrics: `mlflow`: to the active run of MLflow; or called with the values by name and the number of the batch.
        take_stats: What loading counted since it was asked last.

    Raises:
        ConfigError: `metrics` is neither.
    """

    def __init__(self, metrics: str | Sink, take_stats: Callable[[], DataStats]) -> None:
        if metrics != MLFLOW and not callable(metrics):
            raise ConfigError(f"metrics={metrics!r} is neither 'mlflow' nor a function of the values and the batch.")
        self._to_mlflow = ToMlflow() if isinstance(metrics, str) else None
        self._sink: Sink = self._to_mlflow or metrics  # type: ignore[assignment]
        self._take_stats = take_stats
        self._batches = self._reported = 0
        self._waited = 0.0
        self._since: float | None = None

    def measured(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, with the time measured that each is waited for."""
        while True:
            began = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._add(began, time.monotonic())
            yield batch

    def close(self) -> None:
        """Reports what is left; waits a few seconds for it to be sent. Idempotent."""
        if self._batches > self._reported:
            self._report(time.monotonic())
        if self._to_mlflow is not None:
            self._to_mlflow.close()

    def _add(self, began: float, now: float) -> None:
        if self._since is None:
            self._since = began
        self._waited += now - began
        self._batches += 1
        if self._batches - self._reported >= EVERY:
            self._report(now)

    def _report(self, now: float) -> None:
        assert self._since is not None
        values = values_of(self._take_stats(), self._waited, now - self._since, self._batches - self._reported)
        self._since, self._waited, self._reported = now, 0.0, self._batches
        try:
            self._sink(values, self._batches)
        except Exception as error:
            log.warning("metrics of the loader could not be reported: %s: %s", type(error).__name__, error)


def values_of(stats: DataStats, waited: float, elapsed: float, batches: int) -> Values:
    """What is reported, by name.

    Args:
        stats: What loading counted.
        waited: Seconds that the loop was blocked.
        elapsed: Seconds in all.
        batches: How many came in that time.
    """
    values = {
        "data/fetch_seconds": waited / batches,
        "data/fetch_fraction": min(1.0, waited / elapsed) if elapsed > 0 else 0.0,
        "data/cache_hit_rate": stats.hit_rate,
        "data/bytes_fetched": stats.bytes_fetched,
        "data/read_p50": stats.read_seconds(0.5),
        "data/read_p95": stats.read_seconds(0.95),
        "data/retries": stats.retries,
        "data/skipped": stats.skipped,
        "data/worker_restarts": stats.worker_restarts,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


class ToMlflow:
    """Sends values to the MLflow run that is active when they are reported, from a thread."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[str, Values, int, int] | None] = queue.Queue(MOST_WAITING)
        self._thread: Background | None = None
        self._has_warned = False

    def __call__(self, values: Values, step: int) -> None:
        mlflow = sys.modules.get("mlflow")  # without it there is no active run, and importing it takes seconds
        run = mlflow.active_run() if mlflow is not None else None
        if run is None:
            self._warn("there is no active MLflow run: call mlflow.start_run() before")
            return
        if self._thread is None:
            self._thread = Background(self._send, "loader metrics")
            self._thread.start()
        try:
            self._waiting.put_nowait((run.info.run_id, values, step, time.time_ns() // 1_000_000))
        except queue.Full:
            self._warn("the tracking server does not answer")

    def close(self) -> None:
        """Waits a few seconds for what is left. Idempotent."""
        if self._thread is None:
            return
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            self._warn("the tracking server does not answer")
        self._thread.join(CLOSE_SECONDS)
        self._thread = None

    def _send(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        client = MlflowClient()
        while (report := self._waiting.get()) is not None:
            run_id, values, step, now = report
            try:
                client.log_batch(run_id, metrics=[Metric(name, value, now, step) for name, value in values.items()])
            except Exception as error:
                self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("metrics of the loader are not sent to MLflow: %s. This is told once.", why)
