"""How an attempt at a run begins and ends: the directory, the journal, and what the end is called.

Guarantee: the end of every attempt that can still write is in the journal, with its status, whatever raised; callbacks
are closed once each, and a save that is under way is finished first. A disk that is full at the end takes the last
records, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import psutil
import torch
import torchvision
from omegaconf import OmegaConf

from framework.callback import Events
from framework.checkpoint import CheckpointReader, CheckpointStore, Found, Manifest, stock
from framework.errors import (
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_SIGINT,
    CheckpointError,
    ConfigError,
    FrameworkError,
    StateMismatchError,
)
from framework.goodput.accounts.signs import newest_signs
from framework.journal import Journal
from framework.loop import config_changes, lost_ranks, remotes, streams, weights
from framework.loop.control import Requests
from framework.loop.leaves import canonical
from framework.loop.steplog import StepLog
from framework.progress import Progress
from framework.rundir import write_whole
from framework.stepmark import StepMark

if TYPE_CHECKING:
    from framework.trainer import Trainer

log = logging.getLogger(__name__)

STOPPED = "stopped: "  # how the manifest says that a callback, not the budget, ended the run


def versions() -> dict[str, str]:
    """Versions that the bits of a run depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "numpy": numpy.__version__,
    }


def check_directory(trainer: Trainer) -> None:
    """Checks the run directory before anything is built; touches nothing.

    Raises:
        RunOwnedError: Another live process owns it.
        ConfigError: `run.resume` does not allow what it holds.
    """
    trainer.run.refuse_live_owner()
    source = trainer.run_settings.init_from
    if source:
        weights.locate(source)
    checkpoints, resume = trainer.run.shown / trainer.run.checkpoints.name, trainer.run_settings.resume
    has_checkpoints = (
        CheckpointStore(trainer.run.checkpoints).newest() is not None or remotes.newest(trainer) is not None
    )
    if resume == "must" and not has_checkpoints:
        raise ConfigError(f"run.resume=must, but there is no checkpoint in {checkpoints}.")
    if has_checkpoints and resume == "never":
        raise ConfigError(f"run.resume=never, but {checkpoints} holds checkpoints. Give the run another run.name.")
    if has_checkpoints and "auto_resume" not in trainer.callbacks:
        raise ConfigError(
            f"{checkpoints} holds checkpoints, and without callbacks.auto_resume nothing is resumed. "
            f"Give the run another run.name, or keep callbacks.auto_resume."
        )


def done_before(trainer: Trainer) -> Progress:
    """What earlier attempts completed, as the newest checkpoint says without being verified."""
    newest = CheckpointStore(trainer.run.checkpoints).newest()
    manifests = [None if newest is None else newest.header, remotes.newest(trainer)]
    return max((_progress_of(one) for one in manifests if one is not None), key=lambda p: p.step, default=Progress())


def is_finished(trainer: Trainer) -> bool:
    """Whether the newest checkpoint is at the end of the budget, and whole. All ranks ask together.

    Then nothing on disk is touched; progress and weights are those of that checkpoint.

    Raises:
        StateMismatchError: It does not fit the model.
    """
    newest = trainer.group.on_main(lambda: _newest_if_used_up(trainer))
    if newest is None:
        return False
    try:
        found = _load_model(trainer, newest)
    except StateMismatchError:
        raise
    except CheckpointError:  # damaged: the run goes on from the one before it
        return False
    trainer.progress = _progress_of(found.manifest)
    if trainer.world.is_main:
        config_changes.announce(trainer.run.config_file, trainer.config)
        log.info(
            "%s is finished at step %d. Nothing to do; a larger budget extends it, another run.name begins another run.",
            trainer.run.shown, found.step,
        )  # fmt: skip
    return True


def _newest_if_used_up(trainer: Trainer) -> Path | None:
    newest = CheckpointStore(trainer.run.checkpoints).newest()
    if newest is None or newest.header is None or not is_used_up(trainer, newest.manifest):
        return None
    return newest.path


def _progress_of(manifest: Manifest) -> Progress:
    return Progress(manifest.step, manifest.position, manifest.epoch, manifest.skipped)


def is_used_up(trainer: Trainer, manifest: Manifest) -> bool:
    """Whether a checkpoint is at the end of the budget of this run, and no evaluation is left to be made up for."""
    if manifest.unknown.get("pending_evaluation"):
        return False
    if trainer.total_steps is not None and manifest.step >= trainer.total_steps:
        return True
    if trainer.max_time is not None and manifest.elapsed_seconds >= trainer.max_time:
        return True
    was_stopped = manifest.finished is not None and manifest.finished.startswith(STOPPED)
    return was_stopped and not trainer.allows("finished")


def open_run(trainer: Trainer) -> None:
    """Takes the run directory and starts the journal of this attempt.

    Raises:
        RunOwnedError: Another live process owns the directory.
        ConfigError: It cannot be written.
    """
    number, trainer.token, previous = trainer.group.on_main(lambda: _acquire(trainer))
    trainer.attempt = number
    trainer.journal = _open_journal(trainer)
    started = psutil.Process().create_time()
    config = json.dumps(trainer.config, sort_keys=True, default=str).encode()
    trainer.journal.event(
        "attempt_start", durable=True, attempt=number, host=socket.gethostname(), pid=os.getpid(), boot_id=_boot_id(),
        started=started, rank=trainer.world.rank, world_size=trainer.world.size, run=trainer.name, command=sys.argv,
        versions=versions(), config_hash=hashlib.blake2b(config, digest_size=8).hexdigest(),
        allocated=_allocated(), previous=previous if trainer.world.is_main else None,
        config_changed=config_changes.changed(trainer.run.config_file, trainer.config) if trainer.world.is_main else {},
    )  # fmt: skip
    if trainer.world.is_main:
        log.info("run %s, attempt %d, in %s", trainer.name, number, trainer.run.shown)


def open_log(trainer: Trainer) -> StepLog:
    """The log of the steps of this attempt, which rank 0 keeps."""
    if not trainer.world.is_main:
        return StepLog(None, StepMark(None))
    return StepLog(trainer.journal, StepMark(trainer.run.mark_file(trainer.attempt)))


def begin_fresh(trainer: Trainer) -> None:
    """Starts at step 0, with the weights of another run if the settings name one."""
    if (
        trainer.world.is_main
    ):  # a checkpoint has a config of its own to compare with, and that is told as it is restored
        config_changes.announce(trainer.run.config_file, trainer.config)
    if trainer.run_settings.init_from:
        _load_weights(trainer, weights.locate(trainer.run_settings.init_from))
    streams.start(streams.derive(trainer.seed, streams.TRAIN, trainer.world.rank))
    if trainer.world.is_main and trainer.restorer is not None:
        log.info("no checkpoint in %s: starting at step 0", trainer.run.shown / trainer.run.checkpoints.name)


def status_of(stop: Requests) -> str:
    """What an attempt that nothing interrupted is called: by the exit code that it was asked to stop with."""
    if stop.exit_code == EXIT_DONE:
        return "finished"
    return "failed" if stop.exit_code == EXIT_ERROR else "killed"


def record_failure(trainer: Trainer, error: BaseException) -> str:
    """Tells journal and callbacks what ended the attempt; returns its status.

    Raises:
        DistributedError: In place of an error with which a call of torch gave up waiting for other ranks.
    """
    if trainer.world.size > 1 and lost_ranks.is_meant_by(error):
        named = lost_ranks.named(trainer.group, trainer.progress.step, trainer.settings.timeout, error)
        record_failure(trainer, named)
        raise named from error
    if trainer.journal is not None:
        text = "".join(traceback.format_exception(error))
        step = trainer.progress.step
        trainer.journal.event(
            "failure", durable=True, type=type(error).__name__, message=str(error), traceback=text, step=step
        )
    try:
        trainer.events.fire("exception", trainer, error)
    except Exception as another:
        error.add_note(f"While this was handled, another error came up: {type(another).__name__}: {another}")
    status = "killed" if isinstance(error, KeyboardInterrupt) else "failed"
    trainer.stop.exit_code = getattr(error, "exit_code", EXIT_SIGINT) if status == "killed" else EXIT_ERROR
    trainer.stop.stop = trainer.stop.stop or f"{type(error).__name__}: {error}"
    return status


def record_failed_build(trainer: Trainer, error: FrameworkError) -> None:
    """Records a run whose model or data could not be built, so that it is seen as failed wherever runs are looked at."""
    open_run(trainer)
    trainer.events = Events({name: one for name, one in trainer.callbacks.items() if one.records_failed_build}, 1)
    status = record_failure(trainer, error)
    _end(trainer, status)


def close_run(trainer: Trainer, status: str) -> None:
    """Ends the attempt: finish the save under way, say how it ended, close every callback once, give the directory back.

    Raises:
        ExceptionGroup: Closing failed, and nothing else had failed before.
    """
    errors: list[Exception] = []
    try:
        _finish_save(trainer)
    except Exception as error:
        errors.append(error)
    try:
        trainer.events.fire("train_end", trainer, status)
    except Exception as error:
        errors.append(error)
    if errors and status != "failed":
        status = "failed"
        trainer.stop.exit_code = 1
    trainer.log.flush(trainer.meter)
    trainer.log.phases(trainer.meter)
    trainer.log.close()
    errors += _end(trainer, status)
    _guarded("closing the loader", trainer.built.loader.close)
    if trainer.built.evaluation is not None:
        _guarded("closing the evaluation's loader", trainer.built.evaluation.close)
    _report(errors, sys.exc_info()[1])


def _end(trainer: Trainer, status: str) -> list[Exception]:
    assert trainer.journal is not None
    _record_end(trainer, status, trainer.stop.exit_code, trainer.stop.stop or "budget used up")
    errors = trainer.events.close(trainer)
    if errors and sys.exc_info()[1] is None:  # this error ends the process; of two ends the last one counts
        reason = f"{type(errors[0]).__name__}: {errors[0]}"
        _record_end(trainer, "failed", EXIT_ERROR, reason)
    _guarded("closing the control", trainer.control.close)
    _guarded("closing the journal", trainer.journal.close)
    if trainer.lease is not None:
        _guarded("giving the run directory back", trainer.lease.release)
    return errors


def _record_end(trainer: Trainer, status: str, exit_code: int, reason: str) -> None:
    assert trainer.journal is not None
    step = trainer.progress.step
    trainer.journal.event("end", durable=True, status=status, exit_code=exit_code, step=step, reason=reason)


def _guarded(what: str, work: Callable[[], object]) -> None:
    """Does a part of the tidying up that no result depends on, and of which the other parts do not depend."""
    try:
        work()
    except Exception as error:
        log.warning("%s failed: %s: %s", what, type(error).__name__, error)


def _finish_save(trainer: Trainer) -> None:
    if trainer.saver is not None:
        trainer.saver.finish(trainer)


def _report(errors: list[Exception], first: BaseException | None) -> None:
    """An error that came up while closing never hides the one that ended the run, whose traceback comes first."""
    if not errors:
        return
    if first is None:
        raise errors[0] if len(errors) == 1 else ExceptionGroup("closing the run failed", errors)
    for error in errors:
        notes = " ".join(getattr(error, "__notes__", []))
        log.error("while closing: %s: %s %s", type(error).__name__, error, notes)
        first.add_note("".join(["While the run was closed:\n", *traceback.format_exception(error)]).rstrip())


def _acquire(trainer: Trainer) -> tuple[int, str, dict[str, Any] | None]:
    saved = trainer.run.config_file
    text = OmegaConf.to_yaml(OmegaConf.create(trainer.config))  # it quotes what a config reader would take for a number
    try:
        owner = trainer.run.owner()
        trainer.lease = trainer.run.acquire()
        signs = newest_signs(trainer.run, owner)
        if not os.path.lexists(saved) or (saved.is_file() and saved.stat().st_size == 0):
            write_whole(saved, text)
    except OSError as error:
        _give_back(trainer)
        raise ConfigError(
            f"The run directory {trainer.run.shown} cannot be written: {error.strerror or error}. "
            f"Make room there, or set run.root or run.dir."
        ) from error
    return trainer.lease.attempt, trainer.lease.token, None if signs is None else signs.to_json()


def _allocated() -> float | None:
    """When Slurm gave this job its machines, seconds since the epoch; after a requeue, when it gave them again."""
    try:
        return float(os.environ["SLURM_JOB_START_TIME"])
    except (KeyError, ValueError):
        return None


def _open_journal(trainer: Trainer) -> Journal:
    file = trainer.run.events_file(trainer.attempt, trainer.world.rank)
    try:
        return Journal(file, trainer.attempt)
    except OSError as error:
        _give_back(trainer)
        raise ConfigError(
            f"The journal {file} cannot be written: {error.strerror or error}. Make room there, or set run.root or run.dir."
        ) from error


def _give_back(trainer: Trainer) -> None:
    if trainer.lease is not None:
        _guarded("giving the run directory back", trainer.lease.release)
        trainer.lease = None


def _load_weights(trainer: Trainer, source: Path) -> None:
    path = trainer.group.on_main(lambda: weights.newest(source))
    trainer.fence()
    try:
        if trainer.group.on_main(lambda: stock.is_plain(path)):
            left = stock.load_model(path, trainer.built.parts.model_tensors(), trainer.group, rename=canonical)
            what = f"weights taken from {path}, {len(left)} other keys left alone"
        else:
            what = f"weights of step {_load_model(trainer, path).step} taken from {path}"
    except CheckpointError as error:
        raise type(error)(f"run.init_from={path} cannot be used: {error}") from error
    if trainer.built.parts.ema is not None:
        trainer.built.parts.ema.begin()
    if trainer.world.is_main:
        log.info("%s", what)


def _load_model(trainer: Trainer, path: Path) -> Found:
    """Puts the weights and buffers of one checkpoint into the model. All ranks do it together."""
    store = CheckpointStore(path.parent)
    reader = CheckpointReader(store, trainer.world, trainer.group)
    found = reader.open(store.look(path))
    reader.load(found, {"model": trainer.built.parts.model_tensors()}, partial=True)
    return found


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
