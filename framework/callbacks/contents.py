"""What is in a checkpoint: collected from the trainer and its callbacks, and put back.

Guarantee: one list of contents for saving and for loading, so that nothing is saved that is not restored.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from framework.callback import Callback
from framework.checkpoint import TrainState
from framework.errors import CheckpointError
from framework.loop import differences
from framework.progress import Progress

if TYPE_CHECKING:
    from framework.trainer import Trainer

log = logging.getLogger(__name__)

# what comes back from a checkpoint, which is read without running code: by exact type, a subclass would not
_VALUES = {
    type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.device, torch.dtype,
}  # fmt: skip
_LISTS = {list, tuple, set}
_MAPPINGS = {dict, OrderedDict, Counter}
_KEYS = {str, int, bool}


def collect(trainer: Trainer) -> TrainState:
    """The state of a run at the safe point; references to live tensors, copied by whoever saves them."""
    parts = trainer.built.parts
    callbacks, per_rank = {}, {}
    for name, callback in trainer.callbacks.items():
        if state := _state_of(name, callback, "state_dict"):
            callbacks[name] = state
        if state := _state_of(name, callback, "rank_state_dict"):
            per_rank[name] = state
    shared = {
        **parts.shared(),
        "progress": trainer.progress.state_dict(),
        **differences.facts(trainer),
        "elapsed_seconds": trainer.elapsed_seconds,
        "pending_evaluation": trainer.pending_evaluation,
        "last_metrics": trainer.last_metrics,
        "callbacks": callbacks,
    }
    _check(shared["extra_state"], "the extra state of the model")
    tensors, settled = parts.tensors_and_settled(with_buffers=trainer.world.is_main)
    return TrainState(tensors, shared, {"callbacks": per_rank}, settled)


def put_back(trainer: Trainer, shared: dict[str, Any], rank: dict[str, Any] | None) -> list[str]:
    """Gives trainer and callbacks what a checkpoint held beside the tensors.

    Args:
        trainer: Its parts have been loaded.
        shared: Values shared by all ranks.
        rank: This rank's own, none if the checkpoint has none for it.

    Returns:
        What is worth telling.
    """
    notes = []
    progress = Progress.from_state_dict(shared["progress"])
    if not trainer.restores_position:
        start = progress.epoch * trainer.built.num_samples
        notes.append(f"callbacks.data_position is removed: epoch {progress.epoch} starts over, at sample {start}")
        progress = Progress(progress.step, start, progress.epoch, progress.skipped)
    trainer.progress = progress
    trainer.elapsed_before = shared["elapsed_seconds"]
    trainer.pending_evaluation = shared["pending_evaluation"]
    trainer.last_metrics = shared["last_metrics"]
    for name, callback in trainer.callbacks.items():
        if name in shared["callbacks"]:
            _load(name, callback, "load_state_dict", shared["callbacks"][name])
        if rank is not None and name in rank["callbacks"]:
            _load(name, callback, "load_rank_state_dict", rank["callbacks"][name])
    gone = [name for name in shared["callbacks"] if name not in trainer.callbacks]
    notes += [f"callbacks.{name} is no longer there; its saved state is dropped" for name in gone]
    return notes


def _state_of(name: str, callback: Callback, method: str) -> Any:
    """A callback's state, of types that can be saved; an observer that fails has none this time."""
    try:
        state = getattr(callback, method)()
        _check(state, f"callbacks.{name}")
    except Exception as error:
        _failed(name, callback, method, error, "its state is not in this checkpoint")
        return None
    return state


def _load(name: str, callback: Callback, method: str, state: Any) -> None:
    try:
        getattr(callback, method)(state)
    except Exception as error:
        _failed(name, callback, method, error, "it goes on without its saved state")


def _failed(name: str, callback: Callback, method: str, error: Exception, outcome: str) -> None:
    if callback.critical:
        error.add_note(f"raised by {method}() of the callback '{name}'")
        raise error
    log.warning(
        "callback '%s' failed in %s(): %s: %s; %s", name, method, type(error).__name__, error, outcome, exc_info=error
    )


def _check(value: Any, path: str) -> None:
    """Refuses what could not be saved, or not be read again.

    Raises:
        CheckpointError: A value or a key is of another type; the message has the path to it.
    """
    kind = type(value)
    if kind in _VALUES or isinstance(value, Tensor):
        return
    if kind in _LISTS:
        if not set(map(type, value)) <= _VALUES:  # long lists of numbers are common, and done here
            for index, one in enumerate(value):
                _check(one, f"{path}[{index}]")
    elif kind in _MAPPINGS:
        for key, one in value.items():
            if type(key) not in _KEYS:
                raise CheckpointError(
                    f"{path} has the key {key!r:.100} of type {type(key).__name__}, which cannot be saved. Use str or int."
                )
            _check(one, f"{path}.{key}")
    else:
        raise CheckpointError(
            f"{path} is of type {kind.__module__}.{kind.__qualname__}, which cannot be saved. Use None, bool, int, float, "
            f"str, bytes, list, tuple, dict or torch.Tensor, and convert what is something else."
        )
