"""From a token to a batch: the same code in the main process and in the workers.

Guarantee: a batch is a pure function of the token, the seed and the dataset. Whatever a dataset or a collate function
raises comes out as a `DataError` that names the samples, with the original error as its cause; where samples may be
passed over, the receipt of the batch says which.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from framework.data.device import to_device as to_device  # handed on: it belongs to the loader's interface
from framework.data.hooks import Hooks, hooks_of
from framework.data.limits import hint
from framework.data.order import Order
from framework.data.position import ListedToken, Token
from framework.data.receipt import Receipt
from framework.data.samples import RAISE, Samples
from framework.data.seeding import kept
from framework.data.stats import DataStats
from framework.errors import ConfigError, DataError

Ids = npt.NDArray[np.int64]


class Fetcher:
    """Makes batches out of tokens.

    Args:
        dataset: Has `__getitem__(index)`, and perhaps some of the methods in `hooks`.
        samples: Its length.
        seed: Seed of the run.
        collate_fn: Makes one batch out of the list of samples.
        is_shuffled: Whether an epoch visits the samples in the order of `Order`, or by their index.
        is_evaluation: Whether the samples' seeds are those of evaluation, the same in every epoch.
        on_error: What a sample that cannot be loaded does: `raise`; `skip`: the next good sample of its micro-batch
            takes its place; `substitute`: another sample of the dataset does, drawn by hash. In evaluation both leave
            it out.

    Attributes:
        wants_receipts: Whether every batch comes with a receipt, or only where there is something to tell.

    Raises:
        ConfigError: `on_error` is unknown.
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
        on_error: str = RAISE,
    ) -> None:
        self.dataset = dataset
        self.samples = samples
        self.seed = seed
        self.collate_fn = collate_fn
        self.is_shuffled = is_shuffled
        self.is_evaluation = is_evaluation
        self.wants_receipts = False
        self.hooks: Hooks = hooks_of(dataset)
        self._source = Samples(dataset, self.hooks, seed, collate_fn, is_evaluation=is_evaluation, on_error=on_error)
        self._in_use: deque[tuple[int, int]] = deque()  # number of a batch, and how many of them it took

    def serve(self, number: int, token: Token, ahead: Sequence[Token], retired: int) -> tuple[Any, Receipt | None]:
        """Makes a batch, as one in a series.

        Args:
            number: Of the batch; each is larger than the one before.
            token: What to load.
            ahead: What will be asked for later.
            retired: Batches with a smaller number are in use no more.

        Raises:
            DataError: The dataset or the collate function failed.
        """
        self._retire(retired)
        if ahead:
            self.announce(ahead)
        before = self._source.handed
        try:
            return self(token)
        finally:
            self._in_use.append((number, self._source.handed - before))

    def __call__(self, token: Token) -> tuple[Any, Receipt | None]:
        """The collated batch, and its receipt where one is wanted or there is something to tell.

        Raises:
            DataError: The dataset or the collate function failed.
        """
        epochs, ids = self.origin(token)
        samples, epochs, ids, replaced = self._source.load(epochs, ids, self._any_id)
        try:
            batch = self.collate_fn(samples)
        except Exception as error:
            name = getattr(self.collate_fn, "__qualname__", type(self.collate_fn).__name__)
            raise DataError(
                f"{name} could not make a batch of the samples {self.describe(token)} of "
                f"{type(self.dataset).__name__}: {type(error).__name__}: {error}. {hint(error) or _COLLATE_HINT}"
            ) from error
        return batch, self._receipt(epochs, ids, replaced)

    def announce(self, tokens: Sequence[Token]) -> None:
        """Tells the dataset what will be asked for later, in this order.

        Raises:
            DataError: Its `prefetch` failed.
        """
        if self.hooks.prefetch is None:
            return
        try:
            self.hooks.prefetch(np.concatenate([self.ids(token) for token in tokens]).tolist())
        except Exception as error:
            raise DataError(
                f"{type(self.dataset).__name__}.prefetch failed: {type(error).__name__}: {error}. It must only take note "
                "of what comes; loader.look_ahead=0 switches it off."
            ) from error

    def cancel(self) -> None:
        """What was announced will not be asked for: the loader goes on elsewhere."""
        if self.hooks.cancel_prefetch is not None:
            self.hooks.cancel_prefetch()

    def origin(self, token: Token) -> tuple[Ids, Ids]:
        """Epochs and ids of a token, both int64 `[count]`: a batch may span several epochs."""
        if isinstance(token, ListedToken):
            return token.epochs, token.ids
        if self.hooks.stream_ids is not None and self.is_shuffled and not self.is_evaluation:
            epochs, ids = self.hooks.stream_ids(self.seed, token.start, token.stride, token.count)
            return np.asarray(epochs, dtype=np.int64), np.asarray(ids, dtype=np.int64)
        position, stop = token.start, token.start + token.stride * token.count
        parts: list[tuple[int, Ids]] = []
        while position < stop:
            epoch, offset = divmod(position, self.samples)
            end = min(self.samples, offset + stop - position)
            parts.append((epoch, self._ids(epoch, offset, end, token.stride)))
            position += -(-(end - offset) // token.stride) * token.stride
        if len(parts) == 1:
            return np.full(token.count, parts[0][0], dtype=np.int64), parts[0][1]
        nothing = np.empty(0, dtype=np.int64)
        epochs = np.concatenate([nothing, *(np.full(ids.size, epoch, dtype=np.int64) for epoch, ids in parts)])
        return epochs, np.concatenate([nothing, *(ids for _, ids in parts)])

    def ids(self, token: Token) -> Ids:
        """The ids of a token, int64 `[count]`."""
        return self.origin(token)[1]

    def describe(self, token: Token) -> str:
        """The ids of a token for an error message, the first few of many."""
        ids = self.ids(token).tolist()
        return f"{ids}" if len(ids) <= 8 else f"[{', '.join(map(str, ids[:8]))}, … {len(ids)} in all]"

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        """Puts the random generators back that loading in this process moves: the default ones, and private ones."""
        generators = self._source.generators
        with kept():
            state = generators.state()
            try:
                yield
            finally:
                generators.restore(state)

    def _any_id(self, number: int) -> int:
        return int(self.ids(Token(number % self.samples, 1, 1))[0])

    def _ids(self, epoch: int, start: int, stop: int, stride: int) -> Ids:
        if self.is_shuffled:
            return _order(self.samples, self.seed, epoch).ids(start, stop, stride)
        return np.arange(start, stop, stride, dtype=np.int64)

    def _retire(self, number: int) -> None:
        count, in_use = 0, self._in_use
        while in_use and in_use[0][0] < number:
            count += in_use.popleft()[1]
        is_first = not in_use and not count  # with 0, the dataset hears that somebody counts
        if self.hooks.retire is not None and (count or is_first):
            self.hooks.retire(count)

    def _receipt(self, epochs: Ids, ids: Ids, replaced: dict[int, tuple[int, str]]) -> Receipt | None:
        stats = DataStats() if self.hooks.take_stats is None else self.hooks.take_stats()
        if not (self.wants_receipts or replaced or stats != _NOTHING):
            return None
        stats.samples += ids.size  # counted here alone: a dataset may load one twice, or for nobody
        stats.skipped += len(replaced)
        return Receipt(epochs, ids, replaced, stats)


_COLLATE_HINT = "Samples of one batch must have the same fields, shapes and types, or the recipe needs its own collate."
_NOTHING = DataStats()


@functools.lru_cache(maxsize=4)  # an order of few samples is a table, worth keeping while batches walk through it
def _order(samples: int, seed: int, epoch: int) -> Order:
    return Order(samples, seed, epoch)


def map_style_length(dataset: Any) -> int:
    """The length of a map-style dataset.

    Raises:
        ConfigError: It is none.
    """
    gives = hasattr(dataset, "__getitem__") or hasattr(dataset, "fetch_many")
    if isinstance(dataset, torch.utils.data.IterableDataset) or not (hasattr(dataset, "__len__") and gives):
        kind = type(dataset)
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is no map-style dataset: it needs __len__ and __getitem__ and must "
            "not be an IterableDataset, since a position in it could not be found again. The strategy of this version "
            "is loader.position=offset, which loads samples by their index. Give the dataset both methods."
        )
    return len(dataset)
