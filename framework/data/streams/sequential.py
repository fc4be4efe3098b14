"""An iterable dataset that does not split itself, as one whose samples have an index: `loader.split=samples`.

Guarantee: sample `i` of an epoch is the i-th that the dataset gives, whoever asks: the place in the data is one integer,
exact over kills and changes of workers, ranks and batch sizes. Every reader reads the whole stream for it, and gives its
share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from framework.data.seeding import sample_key, seed_sample
from framework.data.streams.pristine import Pristine
from framework.data.streams.states import prepared
from framework.errors import DataError


class SequentialSource:
    """An iterable dataset with indices, for the loader of map-style datasets without shuffling.

    Inside, `torch.utils.data.get_worker_info()` is none: a dataset that looks at it reads everything, too.

    Args:
        dataset: Gives the same samples in the same order whenever it is iterated over with the same random numbers.
        samples: How many of an epoch.
        seed: Seed of the run.
    """

    def __init__(self, dataset: Any, samples: int, seed: int) -> None:
        self.dataset = dataset
        self._samples = samples
        self._seed = seed
        self._name = type(dataset).__name__
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._pristine: Pristine | None = None
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._next = -1, 0

    def __len__(self) -> int:
        return self._samples

    @property
    def fingerprint(self) -> str | None:
        """That of the dataset, if it has one."""
        return getattr(self.dataset, "fingerprint", None)

    def fetch_many(self, epoch: int, ids: Sequence[int]) -> Iterator[Any]:
        """The samples of an epoch at these places, each made when it is asked for.

        Args:
            epoch: Number of the epoch.
            ids: Places in it. What lies before them is read and left out.

        Raises:
            DataError: The dataset ended too early.
        """
        if self._pid != os.getpid():
            self._start()
        for index in ids:
            if epoch != self._epoch or index < self._next or self._iterator is None:
                self._begin(epoch)
            while self._next <= index:
                sample = self._read(index)
            yield sample

    def _begin(self, epoch: int) -> None:
        if self._pristine is None:
            self._pristine = Pristine(self.dataset, self._name)
        with _no_worker():
            dataset = self._pristine.get(epoch)
            prepared(dataset, self._seed, epoch)
            self._iterator = iter(dataset)
        self._epoch, self._next = epoch, 0

    def _read(self, goal: int) -> Any:
        assert self._iterator is not None
        seed_sample(sample_key(self._seed, self._epoch, self._next))
        try:
            with _no_worker():
                sample = next(self._iterator)
        except StopIteration:
            self._iterator = None
            raise DataError(
                f"{self._name} ended after {self._next} samples of epoch {self._epoch}, and should have {self._samples}. "
                f"Correct its __len__ or loader.samples_per_epoch; if it splits itself over ranks, leave loader.split out."
            ) from None
        except Exception:
            self._iterator = None  # a generator that raised is over
            raise
        self._next += 1
        return sample

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_pristine"] = state["_iterator"] = None
        return state


class _no_worker:
    """No worker as far as the dataset can see."""

    def __enter__(self) -> None:
        self._info = torch_worker._worker_info
        torch_worker._worker_info = None

    def __exit__(self, *_: object) -> None:
        torch_worker._worker_info = self._info
