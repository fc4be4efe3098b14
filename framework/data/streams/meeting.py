"""What all readers of a stream find out together before the first sample is trained.

Guarantee: a stream that every reader would read in full is refused by the name of its class, with the readers that gave
the same samples; ranks with other numbers of readers are refused with the numbers. All ranks come to the same verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from framework.data.streams.answering import Task
from framework.data.streams.places import Shape
from framework.data.streams.probe import USELESS, Probed, are_alike, twins
from framework.data.streams.sources import Source, sent_to_all
from framework.errors import ConfigError, DataError

log = logging.getLogger(__name__)


class Meeting:
    """Held once, when the readers have been started. All ranks hold it together.

    Args:
        name: Class of the dataset.
        shape: How many read.
        rank: This rank.
        gather: Gives every rank's value to every rank.
        is_split_checked: Whether it is looked at whether the dataset splits itself.
        has_state: Whether the dataset's own states are tried.

    Attributes:
        late: By how many samples its states are behind, or `USELESS`.
    """

    def __init__(
        self, name: str, shape: Shape, rank: int, gather: Callable[[Any], list[Any]], *,
        is_split_checked: bool, has_state: bool,
    ) -> None:  # fmt: skip
        self.late = 0
        self._name = name
        self._shape = shape
        self._rank = rank
        self._gather = gather
        self._is_split_checked = is_split_checked and shape.ranks * shape.readers > 1
        self._has_state = has_state
        self._is_held = False

    def hold(self, source: Source) -> None:
        """Asks all readers, compares with the other ranks.

        Raises:
            ConfigError: The numbers of readers differ.
            DataError: The dataset does not split itself.
        """
        if self._is_held:
            return
        found: list[Probed] = []
        if self._is_split_checked or self._has_state:
            answers = sent_to_all(source, [Task(0, 0, is_probe=True)] * source.readers)
            found = [answer.probed for answer in answers if answer.probed is not None]
        everyone: list[tuple[int, list[Probed]]] = self._gather((source.readers, found))
        self._is_held = True
        counts = [readers for readers, _ in everyone]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"The ranks have different numbers of readers of {self._name}: {counts} (loader.num_workers, by rank). A "
                "stream is split over ranks and workers, so set the same loader.num_workers on all of them."
            )
        everything = [one for _, some in everyone for one in some]
        if self._is_split_checked:
            self._check_split(everything)
        if self._has_state:
            self._judge_states({one.late for one in everything} - {None})

    def _check_split(self, found: list[Probed]) -> None:
        same = twins(found)
        if same is not None:
            readers = self._shape.readers
            names = " and ".join(f"rank {number // readers} worker {number % readers}" for number in same)
            raise DataError(
                f"{self._name} gives the same samples to {names} ({self._shape}): it does not split itself, so that each "
                f"sample would be trained {self._shape.ranks * readers} times per epoch. Either let its __iter__ take "
                "every n-th sample by rank and torch.utils.data.get_worker_info(); or set loader.split=samples, with "
                "which each reader reads it whole and gives its share; or, where equal samples are meant, loader.split=own."
            )
        if are_alike(found) and self._rank == 0:
            log.warning(
                "%s: the first samples of all readers (%s) are one and the same, so that it cannot be seen whether it "
                "splits itself over ranks and workers. If it does not, each sample is trained once for each reader.",
                self._name, self._shape,
            )  # fmt: skip

    def _judge_states(self, late: set[Any]) -> None:
        self.late = USELESS if USELESS in late else max(late, default=0)
        if self.late == USELESS and self._rank == 0:
            log.warning(
                "%s.state_dict() does not lead back to the next sample: a copy that loaded it gave another one. Its "
                "states are not used; a resume reads its epoch again up to where it was.",
                self._name,
            )
