"""DataPositionCallback: the place in the data, saved and restored.

Guarantee: the position that is saved counts what was trained, never what was prefetched; a resume starts at the next
sample of the same order, whatever the number of ranks, loader workers or the batch size, or is refused. Streams keep a
place for each rank beside it, as of the same step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from framework.callback import Callback
from framework.callbacks.audit_trail import AuditTrail
from framework.data.streams.loader import SHARDS, StreamLoader
from framework.data.streams.sequential import SequentialSource
from framework.errors import StateMismatchError

if TYPE_CHECKING:
    from framework.checkpoint import Found
    from framework.trainer import Trainer

log = logging.getLogger(__name__)

_COMPARED = ("strategy", "order", "samples", "epoch_end")


class DataPositionCallback(Callback):
    """Keeps the position in the data exact over restarts.

    Args:
        audit: Whether the ids of all trained samples are written down, for `python -m framework.data audit RUN`.
    """

    promise = "a resumed run starts the current epoch over: its samples are seen twice"

    def __init__(self, audit: bool = False) -> None:
        self._audit = audit
        self._trail: AuditTrail | None = None
        self._data: dict[str, Any] | None = None  # made once: it does not change while the run goes on

    def setup(self, trainer: Trainer) -> None:
        self._trainer = trainer
        trainer.restores_position = True
        if self._audit:
            self._trail = AuditTrail(trainer)

    def state_loaded(self, trainer: Trainer, found: Found) -> None:
        if self._trail is not None:  # before the first step the trail has not begun; later it is a rollback
            self._trail.back(trainer.progress.step)

    def train_start(self, trainer: Trainer, resumed: bool) -> None:
        if self._trail is not None:
            self._trail.begin(trainer)

    def close(self, trainer: Trainer) -> None:
        if self._trail is not None:
            self._trail.close()

    def state_dict(self) -> dict[str, Any]:
        """Collected on all ranks together, at the safe point."""
        if self._trail is not None:
            self._trail.sync()
        trainer = self._trainer
        built = trainer.built
        state: dict[str, Any] = self._facts()
        if isinstance(built.loader, StreamLoader):
            state["ranks"] = trainer.group.all_gather(built.loader.state())
        if self._data is None and hasattr(built.loader.dataset, "data_state"):
            self._data = built.loader.dataset.data_state()
        if self._data is not None:
            state["data"] = self._data
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the place over; streams are brought there now, which may take time."""
        self.check(state)
        built = self._trainer.built
        if isinstance(built.loader, StreamLoader):
            built.loader.load_state(self._places(state), state["position"])
        elif isinstance(built.loader.dataset, SequentialSource) and (offset := state["position"] % built.num_samples):
            log.warning(
                "%s is read again from the beginning of its epoch up to sample %d: with loader.split=samples there is no "
                "shorter way.", type(built.loader.dataset.dataset).__name__, offset,
            )  # fmt: skip

    def check(self, state: dict[str, Any]) -> None:
        """Refuses a place in other data.

        Raises:
            StateMismatchError: The data differ and `run.allow` does not permit it.
        """
        if not self._trainer.allows("data"):
            self._compare(state)
        loader = self._trainer.built.loader
        if isinstance(loader, StreamLoader):
            loader.check_state(self._places(state), state["position"])

    def _compare(self, state: dict[str, Any]) -> None:
        dataset = self._trainer.built.loader.dataset
        if "data" in state and hasattr(dataset, "check_data_state"):
            dataset.check_data_state(state["data"])
        now = self._facts()
        compared = _COMPARED if "data" in state else (*_COMPARED, "dataset")
        for key in compared:
            if state[key] != now[key]:
                raise StateMismatchError(
                    f"The data changed since the checkpoint: {key} is now {now[key]!r}, was {state[key]!r}. Samples would be "
                    f"repeated or left out. Use the same data, another run.name, or permit it with run.allow=[data]."
                )

    def _places(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """The places of the ranks, as far as they mean anything in these data."""
        now = self._facts()
        is_cut_anew = now["strategy"] == SHARDS and any(state[key] != now[key] for key in ("samples", "dataset"))
        return [] if is_cut_anew else state.get("ranks", [])

    def _facts(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "strategy": trainer.built.strategy,
            "order": trainer.built.data.order,
            "position": trainer.progress.position,
            "samples": trainer.built.num_samples,
            "epoch_end": trainer.loader_settings.epoch_end,
            "dataset": trainer.built.fingerprint,
        }
