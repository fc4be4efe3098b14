"""What is in a checkpoint: collected from the trainer and its callbacks, and put back.

Guarantee: one list of contents for saving and for loading, so that nothing is saved that is not restored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from framework.checkpoint import TrainState
from framework.progress import Progress

if TYPE_CHECKING:
    from framework.trainer import Trainer


def collect(trainer: Trainer) -> TrainState:
    """The state of a run at the safe point; references to live tensors, copied by whoever saves them."""
    parts = trainer.built.parts
    callbacks, per_rank = {}, {}
    for name, callback in trainer.callbacks.items():
        if state := callback.state_dict():
            callbacks[name] = state
        if state := callback.rank_state_dict():
            per_rank[name] = state
    shared = {
        **parts.shared(),
        "progress": trainer.progress.state_dict(),
        "seed": trainer.seed,
        "world_size": trainer.world.size,
        "global_batch_size": trainer.settings.global_batch_size,
        "elapsed_seconds": trainer.elapsed_seconds,
        "pending_evaluation": trainer.pending_evaluation,
        "last_metrics": trainer.last_metrics,
        "callbacks": callbacks,
        "config": trainer.config,
    }
    return TrainState(parts.tensors(with_buffers=trainer.world.is_main), shared, {"callbacks": per_rank})


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
            callback.load_state_dict(shared["callbacks"][name])
        if rank is not None and name in rank["callbacks"]:
            callback.load_rank_state_dict(rank["callbacks"][name])
    gone = [name for name in shared["callbacks"] if name not in trainer.callbacks]
    notes += [f"callbacks.{name} is no longer there; its saved state is dropped" for name in gone]
    return notes
