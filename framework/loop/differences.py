"""What differs between a checkpoint and the run that goes on from it.

Guarantee: what would make the result another one without a word (seed, data, model, optimizer) is refused before
anything is changed, naming both values, unless `run.allow` permits it. Everything else is the new config's, and is
told. What a checkpoint says about its config is data: it is compared and shown, and nothing is built from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from framework.checkpoint import Found
from framework.errors import StateMismatchError
from framework.loop import attempt, config_changes

if TYPE_CHECKING:
    from framework.trainer import Trainer

LISTED = 30  # keys of the config named one by one
_MISSING = object()
# told as what they amount to, or of no meaning for another attempt
_ELSEWHERE = {
    "seed", "trainer.global_batch_size", "trainer.micro_batch_size", "trainer.num_threads", "loader.num_workers",
}  # fmt: skip


def facts(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint says about the run that wrote it, for a later `notes_on`."""
    return {
        "seed": trainer.seed,
        "world_size": trainer.world.size,
        "global_batch_size": trainer.settings.global_batch_size,
        "micro_batch_size": trainer.built.micro_batch_size,
        "num_workers": trainer.built.loader.num_workers,
        "config": trainer.config,
    }


def notes_on(trainer: Trainer, found: Found, shared: Mapping[str, Any]) -> list[str]:
    """Differences that are allowed, one line each.

    Args:
        trainer: Built, not yet restored.
        found: The checkpoint.
        shared: Its values that all ranks share.

    Raises:
        StateMismatchError: The seed differs and `run.allow` does not permit it.
    """
    if shared["seed"] != trainer.seed and not trainer.allows("seed"):
        raise StateMismatchError(
            f"seed={trainer.seed}, but {found.path} was written with seed={shared['seed']!r:.40}. "
            f"Use that seed, another run.name, or permit it with run.allow=[seed]."
        )
    now = facts(trainer)
    pairs: dict[str, tuple[Any, Any]] = {
        "seed": (now["seed"], shared["seed"]),
        "world size": (now["world_size"], shared["world_size"]),
        "global batch": (now["global_batch_size"], shared["global_batch_size"]),
        "micro-batch": (now["micro_batch_size"], shared.get("micro_batch_size", _MISSING)),
        "loader workers": (now["num_workers"], shared.get("num_workers", _MISSING)),
        "threads": (torch.get_num_threads(), found.manifest.threads),
    }
    for name, version in attempt.versions().items():
        pairs[name] = (version, found.manifest.versions.get(name, _MISSING))
    notes = [
        f"{name} is now {new}, was {old!s:.100}"
        for name, (new, old) in pairs.items()
        if old is not _MISSING and new != old
    ]
    return notes + list(_in_config(trainer.config, shared.get("config")))


def _in_config(now: Mapping[str, Any], then: Any) -> Iterator[str]:
    """Keys whose value is another one now; callbacks that came and went by their names alone."""
    if not isinstance(then, Mapping):
        return
    new, old = config_changes.flatten(now), config_changes.flatten(then)
    came_or_gone = _callbacks(now) ^ _callbacks(then)
    for name in sorted(_callbacks(now) - _callbacks(then)):
        yield f"callbacks.{name} is new; it starts without a state"
    changed = [
        key
        for key in dict.fromkeys([*old, *new])
        if new.get(key) != old.get(key)
        and key not in _ELSEWHERE
        and not str(key).startswith("run.")
        and not _is_of(str(key), came_or_gone)
    ]
    for key in changed[:LISTED]:
        yield config_changes.words(key, old.get(key, config_changes.ABSENT), new.get(key, config_changes.ABSENT))
    if len(changed) > LISTED:
        yield f"… and {len(changed) - LISTED} more keys of the config"


def _callbacks(config: Mapping[str, Any]) -> set[str]:
    callbacks = config.get("callbacks")
    if not isinstance(callbacks, Mapping):
        return set()
    return {str(name) for name, node in callbacks.items() if node is not None}


def _is_of(key: str, callbacks: set[str]) -> bool:
    first, _, rest = key.partition(".")
    return first == "callbacks" and rest.split(".")[0] in callbacks
