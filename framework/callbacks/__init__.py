"""The built-in callbacks: names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.callbacks.async_checkpoint import AsyncCheckpointCallback as AsyncCheckpointCallback
    from framework.callbacks.auto_resume import AutoResumeCallback as AutoResumeCallback
    from framework.callbacks.csv import CSVCallback as CSVCallback
    from framework.callbacks.data_meter import DataMeterCallback as DataMeterCallback
    from framework.callbacks.data_position import DataPositionCallback as DataPositionCallback
    from framework.callbacks.defaults import default_callbacks as default_callbacks
    from framework.callbacks.goodput_meter import GoodputMeterCallback as GoodputMeterCallback
    from framework.callbacks.mlflow import MLflowCallback as MLflowCallback
    from framework.callbacks.non_finite import NonFiniteCallback as NonFiniteCallback
    from framework.callbacks.preemption import PreemptionCallback as PreemptionCallback
    from framework.callbacks.progress import ProgressCallback as ProgressCallback
    from framework.callbacks.rng_state import RNGStateCallback as RNGStateCallback
    from framework.callbacks.tensorboard import TensorBoardCallback as TensorBoardCallback

_HOMES = {
    "AsyncCheckpointCallback": "async_checkpoint",
    "AutoResumeCallback": "auto_resume",
    "CSVCallback": "csv",
    "DataMeterCallback": "data_meter",
    "DataPositionCallback": "data_position",
    "GoodputMeterCallback": "goodput_meter",
    "MLflowCallback": "mlflow",
    "NonFiniteCallback": "non_finite",
    "PreemptionCallback": "preemption",
    "ProgressCallback": "progress",
    "RNGStateCallback": "rng_state",
    "TensorBoardCallback": "tensorboard",
    "default_callbacks": "defaults",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"framework.callbacks.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
