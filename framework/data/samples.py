"""Samples by their ids, each with random numbers of its own, and what becomes of those that cannot be loaded.

Guarantee: a sample is a pure function of seed, epoch and key. Whatever a dataset raises comes out as a `DataError` that
names the sample, with the original error as its cause, or is passed over as `on_error` says; in training there are then
as many samples as there should be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from framework.data.hooks import Hooks
from framework.data.private import Generators
from framework.data.seeding import EVALUATION, derive, sample_key, seed_sample
from framework.errors import ConfigError, DataError, FrameworkError, suggest

Ids = npt.NDArray[np.int64]

RAISE, SKIP, SUBSTITUTE = "raise", "skip", "substitute"
MOST_TRIES = 8  # of other samples in the place of a damaged one

# Not the fault of one sample: passing over it would hide what is wrong with all of them.
_NEVER_PASSED_OVER = (MemoryError, torch.OutOfMemoryError, NameError, ImportError)


class Samples:
    """The samples of a dataset.

    Args:
        dataset: Has `__getitem__(index)`, or `fetch_many` among its hooks.
        hooks: What else it offers.
        seed: Seed of the run.
        collate_fn: Its private generators are seeded as well.
        is_evaluation: Whether random numbers are those of evaluation, the same in every epoch.
        on_error: `raise`, `skip` or `substitute`, see `Fetcher`.

    Attributes:
        handed: How many the dataset has given.

    Raises:
        ConfigError: `on_error` is unknown.
    """

    def __init__(
        self, dataset: Any, hooks: Hooks, seed: int, collate_fn: Any, *, is_evaluation: bool, on_error: str
    ) -> None:
        known = (RAISE, SKIP, SUBSTITUTE)
        if on_error not in known:
            raise ConfigError(
                f"loader.on_error={on_error!r} is none of {', '.join(known)}.{suggest(str(on_error), known)}"
            )
        self.handed = 0
        self._dataset = dataset
        self._hooks = hooks
        self._seed_of_run = seed
        self._collate_fn = collate_fn
        self._is_evaluation = is_evaluation
        self._on_error = on_error
        self._generators: Generators | None = None  # looked for by the process that loads
        self._has_looked_twice = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_generators": None, "_has_looked_twice": False}

    @property
    def generators(self) -> Generators:
        """What dataset and collate function keep for themselves to draw random numbers from."""
        if self._generators is None:
            self._generators = Generators(dataset=self._dataset, collate=self._collate_fn)
        return self._generators

    def load(
        self, epochs: Ids, ids: Ids, any_id: Callable[[int], int]
    ) -> tuple[list[Any], Ids, Ids, dict[int, tuple[int, str]]]:
        """The samples of a batch.

        Args:
            epochs: Epoch of each, int64 `[count]`.
            ids: Id of each, int64 `[count]`.
            any_id: An id of the dataset for any number of 63 bits.

        Returns:
            The samples, their epochs and ids, and by place those that could not be loaded: id, and what was wrong.

        Raises:
            DataError: One cannot be loaded and must not be passed over, or nothing can take its place.
        """
        samples, failures = self._all(epochs.tolist(), ids.tolist())
        if not failures:
            return samples, epochs, ids, {}
        replaced = {place: (int(ids[place]), what) for place, what in failures.items()}
        return *self._mended(samples, epochs, ids, failures, any_id), replaced

    # -- one after another -------------------------------------------------------------------------------------------

    def _all(self, epochs: list[int], ids: list[int]) -> tuple[list[Any], dict[int, str]]:
        """The samples, with none in the place of each that failed; and what was wrong with those, by place."""
        if self._hooks.fetch_many is not None:
            return self._all_by_many(epochs, ids)
        samples: list[Any] = []
        failures: dict[int, str] = {}
        for epoch, index in zip(epochs, ids, strict=True):
            try:
                samples.append(self._one(epoch, index))
            except Exception as error:
                failures[len(samples)] = self._passed_over(index, epoch, error)
                samples.append(None)
        return samples, failures

    def _one(self, epoch: int, index: int) -> Any:
        self._seed(epoch, index)
        sample = self._dataset[index]
        self.handed += 1
        if not self._has_looked_twice and self._looks_again():  # made for this very sample, from nowhere
            return self._one(epoch, index)
        return sample

    def _looks_again(self) -> bool:
        """Whether the first sample brought private generators with it."""
        self._has_looked_twice = True
        return self.generators.look()

    def _seed(self, epoch: int, index: int) -> None:
        stream = EVALUATION if self._is_evaluation else epoch
        key = sample_key(self._seed_of_run, stream, self._hooks.key_of(index))
        seed_sample(key)
        generators = self._generators
        if generators is None:
            generators = self.generators
        if generators:
            generators.seed(key)

    def _all_by_many(self, epochs: list[int], ids: list[int]) -> tuple[list[Any], dict[int, str]]:
        samples: list[Any] = [None] * len(ids)
        failures: dict[int, str] = {}
        place = 0
        while place < len(ids):
            epoch, end = epochs[place], place + 1
            while end < len(ids) and epochs[end] == epoch:
                end += 1
            for at, sample, error in self._series(epoch, ids[place:end]):
                if error is not None:
                    failures[place + at] = self._passed_over(ids[place + at], epoch, error)
                samples[place + at] = sample
            place = end
        return samples, failures

    def _series(self, epoch: int, ids: list[int]) -> Iterator[tuple[int, Any, Exception | None]]:
        """Place, sample, and error of each id of one epoch, by `fetch_many`; after an error it is asked anew."""
        assert self._hooks.fetch_many is not None
        name, place = type(self._dataset).__name__, 0
        while place < len(ids):
            source: Iterator[Any] | None = None
            for index in ids[place:]:
                try:
                    self._seed(epoch, index)
                    if source is None:
                        source = iter(self._hooks.fetch_many(epoch, ids[place:]))
                    sample = next(source)
                except StopIteration:
                    raise DataError(
                        f"{name} ended before it gave sample {index} of epoch {epoch}: it must give one sample for each "
                        "that it is asked for."
                    ) from None
                except Exception as error:
                    yield place, None, error
                    place += 1
                    break
                self.handed += 1
                if not self._has_looked_twice:
                    self._looks_again()
                yield place, sample, None
                place += 1
            else:
                for _ in source or ():  # it may have something to check at its end
                    raise DataError(f"{name} gave more samples than the {len(ids)} that it was asked for.")

    def _again(self, epoch: int, index: int) -> Any:
        """One sample alone, by whichever way the dataset has."""
        if self._hooks.fetch_many is None:
            return self._one(epoch, index)
        ((_, sample, error),) = self._series(epoch, [index])
        if error is not None:
            raise error
        return sample

    # -- those that cannot be loaded ---------------------------------------------------------------------------------

    def _passed_over(self, index: int, epoch: int, error: Exception) -> str:
        """What is wrong with a sample.

        Raises:
            DataError: It must not be passed over.
        """
        failure = self._failure(index, epoch, error)
        is_bug = isinstance(error, FrameworkError) and not isinstance(error, DataError)
        if self._on_error == RAISE or is_bug or isinstance(error, _NEVER_PASSED_OVER):
            raise failure from error
        return str(failure)

    def _mended(
        self, samples: list[Any], epochs: Ids, ids: Ids, failures: dict[int, str], any_id: Callable[[int], int]
    ) -> tuple[list[Any], Ids, Ids]:
        if self._on_error == SUBSTITUTE and not self._is_evaluation:
            ids = ids.copy()
            for place, failure in failures.items():
                found = self._substitute(int(epochs[place]), int(ids[place]), failure, any_id)
                samples[place], ids[place] = found
            return samples, epochs, ids
        good = [place for place in range(len(samples)) if place not in failures]
        if not good:
            first = failures[min(failures)]
            raise DataError(
                f"None of the {len(samples)} samples of a batch could be loaded, so that loader.on_error="
                f"{self._on_error} has nothing to go on with. The first: {first}"
            )
        if self._is_evaluation:
            places = good
        else:
            places = [next((one for one in good if one >= place), good[0]) for place in range(len(samples))]
        return [samples[place] for place in places], epochs[places], ids[places]

    def _substitute(self, epoch: int, index: int, failure: str, any_id: Callable[[int], int]) -> tuple[Any, int]:
        last = None
        for attempt in range(MOST_TRIES):
            other = any_id(derive(self._seed_of_run, "substitute", epoch, index, attempt))
            try:
                return self._again(epoch, other), other
            except Exception as error:
                self._passed_over(other, epoch, error)
                last = error
        raise DataError(
            f"{failure}. None of {MOST_TRIES} other samples that were to take its place (loader.on_error=substitute) "
            "could be loaded either."
        ) from last

    def _failure(self, index: int, epoch: int, error: Exception) -> DataError:
        try:
            key = self._hooks.key_of(index)
        except Exception:  # the key may be what failed; the error of the sample matters more
            key = index
        named = f"sample {index}" if key == index else f"sample {index} ({key})"
        return DataError(
            f"{type(self._dataset).__name__} could not give {named} of epoch {epoch}: {type(error).__name__}: {error}"
        )
