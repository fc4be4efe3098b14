"""NonFiniteCallback: what happens when loss or gradient norm is not finite.

Guarantee: the update of such a step never happens. The step and the ids of its samples are named.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from framework.callback import Callback
from framework.errors import ConfigError, NonFiniteError
from framework.loop.update import NON_FINITE, Skip

if TYPE_CHECKING:
    from framework.trainer import Trainer

log = logging.getLogger(__name__)

STOP, SKIP, ROLLBACK = "stop", "skip", "rollback"
SHOWN_IDS = 16


class NonFiniteCallback(Callback):
    """Stops, skips the step, or goes back to the newest checkpoint and leaves the step out the next time.

    A skipped step leaves weights and optimizer as they were, but buffers such as those of BatchNorm have seen its batch;
    after a rollback they have not.

    Args:
        policy: `stop`, `skip` or `rollback`.
        limit: How many steps may be skipped, or rollbacks made, over the whole run, before it stops after all.
    """

    promise = "a loss that is not finite goes into the weights"

    def __init__(self, policy: str = STOP, limit: int = 10) -> None:
        if policy not in (STOP, SKIP, ROLLBACK):
            raise ConfigError(f"callbacks.non_finite.policy={policy!r} must be {STOP}, {SKIP} or {ROLLBACK}.")
        if limit < 1:
            raise ConfigError(f"callbacks.non_finite.limit={limit} must be at least 1.")
        self._policy = policy
        self._limit = limit
        self._left_out: list[int] = []
        self._count = 0

    def setup(self, trainer: Trainer) -> None:
        self._trainer = trainer
        trainer.built.update.is_gated = True
        trainer.skip_listeners.append(self._skipped)
        cost = trainer.built.update.describe()
        if cost and trainer.world.is_main:
            log.info("callbacks.non_finite: %s", cost)

    def state_dict(self) -> dict[str, Any]:
        return {"left_out": self._left_out, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # in a rollback the live values are newer than the checkpoint's: steps found bad since then stay left out
        self._left_out = sorted({*self._left_out, *state["left_out"]})
        self._count = max(self._count, state["count"])
        self._trainer.built.update.left_out.update(self._left_out)

    def _skipped(self, skip: Skip) -> None:
        if skip.reason != NON_FINITE:
            return
        trainer = self._trainer
        ids = trainer.ids_of(skip.step)
        shown = ", ".join(map(str, ids[:SHOWN_IDS])) + (f", … ({len(ids)} in all)" if len(ids) > SHOWN_IDS else "")
        what = f"step {skip.step}: loss or gradient norm is not finite; samples {shown}"
        self._count += 1
        if self._policy == STOP or self._count > self._limit:
            limit = (
                ""
                if self._policy == STOP
                else f" This is number {self._count}, callbacks.non_finite.limit={self._limit}."
            )
            raise NonFiniteError(
                f"{what}. The update was not made.{limit} Look at these samples and the learning rate, or set "
                f"callbacks.non_finite.policy to skip or rollback."
            )
        log.warning("%s. The update was not made.", what)
        if self._policy == ROLLBACK:
            self._left_out.append(skip.step)
            trainer.built.update.left_out.add(skip.step)
            trainer.request_rollback(what)
