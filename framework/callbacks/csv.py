"""CSVCallback: the metrics of the run as a CSV file.

Guarantee: as `framework.callbacks.followed` says.
"""

from __future__ import annotations

from framework.callbacks.followed import FollowedCallback


class CSVCallback(FollowedCallback):
    """One row a step, one column a metric: what MLflow gets, for tools that read tables.

    Args:
        file: The file; default `metrics.csv` in the run directory.
    """

    option, usual = "--csv", "metrics.csv"

    def __init__(self, file: str | None = None) -> None:
        super().__init__(file)
