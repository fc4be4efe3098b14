"""DataPositionCallback: the place in the data, saved and restored.

Guarantee: the position that is saved counts what was trained, never what was prefetched; a resume starts at the next
sample of the same order, whatever the number of ranks, loader workers or the batch size, or is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from framework.callback import Callback
from framework.data import order
from framework.errors import StateMismatchError

if TYPE_CHECKING:
    from framework.trainer import Trainer


class DataPositionCallback(Callback):
    """Keeps the position in the data exact over restarts."""

    promise = "a resumed run starts the current epoch over: its samples are seen twice"

    def setup(self, trainer: Trainer) -> None:
        self._trainer = trainer
        trainer.restores_position = True

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "strategy": trainer.built.strategy,
            "order": order.SPEC,
            "position": trainer.progress.position,
            "samples": trainer.built.num_samples,
            "epoch_end": trainer.loader_settings.epoch_end,
            "dataset": trainer.built.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check(state)

    def check(self, state: dict[str, Any]) -> None:
        """Refuses a place in other data.

        Raises:
            StateMismatchError: The data differ and `run.allow` does not permit it.
        """
        now = self.state_dict()
        allowed = self._trainer.allows("data")
        for key in ("strategy", "order", "samples", "epoch_end", "dataset"):
            if state[key] != now[key] and not allowed:
                raise StateMismatchError(
                    f"The data changed since the checkpoint: {key} is now {now[key]!r}, was {state[key]!r}. Samples would be "
                    f"repeated or left out. Use the same data, another run.name, or permit it with run.allow=[data]."
                )
