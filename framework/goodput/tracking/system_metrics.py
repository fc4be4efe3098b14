"""The use of the host that trains: MLflow's own sampler, kept going.

Guarantee: sampling happens in the exporter's process and never ends it. MLflow's sampler gives up when the server does
not answer; it is started again then, and no two of its points have the same step: the step is the number of the
interval since the run began. What an outage hides is not made up for: these are the only points that are in no journal.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0
STOP_SECONDS = 5.0


class SystemSampler:
    """CPU, memory, disk and network of this host, and its GPUs if there are any, as metrics `system/...`.

    Args:
        uri: Tracking URI.
        started: When the run began, seconds since the epoch.
    """

    def __init__(self, uri: str, started: float) -> None:
        self._uri = uri
        self._started = started
        self._monitor: Any = None
        self._retry_at = 0.0

    def keep_running(self, run_id: str) -> None:
        """Starts the sampler if it does not run. An error of the sampler is logged, and it is tried again later."""
        if self._is_running() or time.monotonic() < self._retry_at:
            return
        try:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            make: Any = SystemMetricsMonitor
            monitor = make(run_id, sampling_interval=INTERVAL_SECONDS, tracking_uri=self._uri)
            interval = max(float(monitor.sampling_interval) * max(int(monitor.samples_before_logging), 1), 0.001)
            self._retry_at = time.monotonic() + interval
            monitor._logging_step = max(int((time.time() - self._started) / interval), 0)
            monitor.start()
            self._monitor = monitor
        except Exception as error:  # of psutil, of the driver's library, or of another version of MLflow
            self._retry_at = time.monotonic() + 6 * INTERVAL_SECONDS
            log.warning("the host is not sampled: %s: %s", type(error).__name__, error)

    def stop(self) -> None:
        """Ends the sampler and sends what it has; waits 5 s at most."""
        if self._monitor is None:
            return
        thread = threading.Thread(target=self._monitor.finish, name="sampler", daemon=True)
        thread.start()
        thread.join(STOP_SECONDS)
        self._monitor = None

    def _is_running(self) -> bool:
        thread = getattr(self._monitor, "_process", None)
        return isinstance(thread, threading.Thread) and thread.is_alive()
