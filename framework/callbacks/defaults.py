"""The callbacks that a run has unless it says otherwise.

Guarantee: the same ones, under the same names and with the same options, as `configs/callbacks/default.yaml`.
"""

from __future__ import annotations

from framework.callback import Callback
from framework.callbacks.async_checkpoint import AsyncCheckpointCallback
from framework.callbacks.auto_resume import AutoResumeCallback
from framework.callbacks.data_meter import DataMeterCallback
from framework.callbacks.data_position import DataPositionCallback
from framework.callbacks.goodput_meter import GoodputMeterCallback
from framework.callbacks.mlflow import MLflowCallback
from framework.callbacks.non_finite import NonFiniteCallback
from framework.callbacks.preemption import PreemptionCallback
from framework.callbacks.progress import ProgressCallback
from framework.callbacks.rng_state import RNGStateCallback


def default_callbacks() -> dict[str, Callback]:
    """New callbacks for one run made from Python, in their order; change or remove entries as you like."""
    return {
        "auto_resume": AutoResumeCallback(),
        "rng_state": RNGStateCallback(),
        "data_position": DataPositionCallback(),
        "async_checkpoint": AsyncCheckpointCallback(),
        "goodput": GoodputMeterCallback(),
        "data_meter": DataMeterCallback(),
        "progress": ProgressCallback(),
        "mlflow": MLflowCallback(),
        "preemption": PreemptionCallback(),
        "non_finite": NonFiniteCallback(),
    }
