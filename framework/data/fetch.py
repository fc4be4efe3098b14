"""From a token to a batch: the same code in the main process and in the workers.

Guarantee: a batch is a pure function of the token, the seed and the dataset. Whatever a dataset or a collate function
raises comes out as a `DataError` that names the sample, with the original error as its cause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from framework.data.order import Order
from framework.data.position import Token
from framework.data.seeding import EVALUATION, sample_key, seed_sample
from framework.errors import ConfigError, DataError

Ids = npt.NDArray[np.int64]

_MOVABLE = (torch.Tensor, tuple, list, dict, Mapping)  # the cheap ones to ask for first


class Fetcher:
    """Makes batches out of tokens.

    Args:
        dataset: Has `__getitem__(index)`, and perhaps `sample_key(index) -> str | int`.
        samples: Its length.
        seed: Seed of the run.
        collate_fn: Makes one batch out of the list of samples.
        is_shuffled: Whether an epoch visits the samples in the order of `Order`, or by their index.
        is_evaluation: Whether the samples' seeds are those of evaluation, the same in every epoch.
    """

    def __init__(
        self,
        dataset: Any,
        samples: int,
        seed: int,
        collate_fn: Callable[[list[Any]], Any],
        *,
        is_shuffled: bool,
        is_evaluation: bool,
    ) -> None:
        self.dataset = dataset
        self.samples = samples
        self.seed = seed
        self.collate_fn = collate_fn
        self.is_shuffled = is_shuffled
        self.is_evaluation = is_evaluation
        self.key_of: Callable[[int], int | str] = getattr(dataset, "sample_key", int)

    def __call__(self, token: Token) -> Any:
        """The collated batch.

        Raises:
            DataError: The dataset or the collate function failed.
        """
        samples = []
        dataset, seed, key_of = self.dataset, self.seed, self.key_of
        for epoch, ids in self.epochs(token):
            stream = EVALUATION if self.is_evaluation else epoch
            for index in ids.tolist():
                try:
                    seed_sample(sample_key(seed, stream, key_of(index)))
                    samples.append(dataset[index])
                except Exception as error:
                    raise self._sample_error(index, epoch, error) from error
        try:
            return self.collate_fn(samples)
        except Exception as error:
            name = getattr(self.collate_fn, "__qualname__", type(self.collate_fn).__name__)
            raise DataError(
                f"{name} could not make a batch of the samples {self.describe(token)} of "
                f"{type(self.dataset).__name__}: {type(error).__name__}: {error}. Samples of one batch must have the "
                "same fields, shapes and types, or the recipe needs its own collate."
            ) from error

    def epochs(self, token: Token) -> Iterator[tuple[int, Ids]]:
        """The ids of a token, epoch by epoch: a batch may span several.

        Yields:
            Number of the epoch, and ids as int64 `[any]`.
        """
        position, stop = token.start, token.start + token.stride * token.count
        while position < stop:
            epoch, offset = divmod(position, self.samples)
            end = min(self.samples, offset + stop - position)
            yield epoch, self._ids(epoch, offset, end, token.stride)
            position += -(-(end - offset) // token.stride) * token.stride

    def ids(self, token: Token) -> Ids:
        """The ids of a token, int64 `[count]`."""
        return np.concatenate([np.empty(0, dtype=np.int64), *(ids for _, ids in self.epochs(token))])

    def describe(self, token: Token) -> str:
        """The ids of a token for an error message, the first few of many."""
        ids = self.ids(token).tolist()
        return f"{ids}" if len(ids) <= 8 else f"[{', '.join(map(str, ids[:8]))}, … {len(ids)} in all]"

    def _ids(self, epoch: int, start: int, stop: int, stride: int) -> Ids:
        if self.is_shuffled:
            return _order(self.samples, self.seed, epoch).ids(start, stop, stride)
        return np.arange(start, stop, stride, dtype=np.int64)

    def _sample_error(self, index: int, epoch: int, error: Exception) -> DataError:
        try:
            key = self.key_of(index)
        except Exception:  # the key may be what failed; the error of the sample matters more
            key = index
        named = f"sample {index}" if key == index else f"sample {index} ({key})"
        return DataError(
            f"{type(self.dataset).__name__} could not give {named} of epoch {epoch}: {type(error).__name__}: {error}"
        )


@functools.lru_cache(maxsize=4)  # an order of few samples is a table, worth keeping while batches walk through it
def _order(samples: int, seed: int, epoch: int) -> Order:
    return Order(samples, seed, epoch)


def map_style_length(dataset: Any) -> int:
    """The length of a map-style dataset.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(dataset, torch.utils.data.IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        kind = type(dataset)
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is no map-style dataset: it needs __len__ and __getitem__ and must "
            "not be an IterableDataset, since a position in it could not be found again. The strategy of this version "
            "is loader.position=offset, which loads samples by their index. Give the dataset both methods."
        )
    return len(dataset)


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with every tensor in nested mappings, lists, tuples and named tuples changed; the rest as it is."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if type(batch) is tuple or type(batch) is list:  # before the classes below, which are slow to ask for
        return type(batch)([map_tensors(value, change) for value in batch])
    if isinstance(batch, Mapping):
        items = {key: map_tensors(value, change) for key, value in batch.items()}
        return items if type(batch) is dict else type(batch)(items)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


def to_device(batch: Any, device: torch.device | str, channels_last: bool = False) -> Any:
    """The batch with its tensors on `device`; page-locked ones are copied without waiting.

    Args:
        batch: Tensors in nested mappings, lists and tuples; other values stay. An object of another class that has a
            method `to(device)` is moved by it.
        device: Where to.
        channels_last: Memory format of tensors with 4 dimensions (`[batch, channels, height, width]`).
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if channels_last and tensor.dim() == 4:
            return tensor.to(device, non_blocking=True, memory_format=torch.channels_last)
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    if not isinstance(batch, _MOVABLE) and hasattr(batch, "to"):
        return batch.to(device)
    return map_tensors(batch, move)


def pin(batch: Any) -> Any:
    """The batch with its tensors in page-locked memory."""
    return map_tensors(batch, torch.Tensor.pin_memory)
