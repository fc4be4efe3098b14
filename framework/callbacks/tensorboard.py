"""TensorBoardCallback: the metrics of the run for TensorBoard.

Guarantee: as `framework.callbacks.followed` says.
"""

from __future__ import annotations

from framework.callbacks.followed import FollowedCallback
from framework.goodput.tracking.tensorboard_log import check_installed


class TensorBoardCallback(FollowedCallback):
    """The curves that MLflow gets, as an event file. Needs `pip install 'goodput-framework[tensorboard]'`.

    Args:
        folder: Where event files go; default `tensorboard` in the run directory.
    """

    option, usual = "--tensorboard", "tensorboard"

    def __init__(self, folder: str | None = None) -> None:
        check_installed()
        super().__init__(folder)
