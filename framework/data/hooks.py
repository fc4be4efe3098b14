"""What a dataset may offer beside its samples: plain methods, looked up once; a dataset without them works as well.

Guarantee: every method is optional and found by its name alone, so that a dataset need not import this package; a value
of that name which cannot be called is none. Through `torch.utils.data.Subset` the ones that concern files are found too,
with the indices of the dataset inside.

- `sample_key(index) -> int | str`: identity of a sample, for its random numbers.
- `prefetch(indices) -> None`: these will be asked for later, in this order. Called in the process that loads; cheap.
- `cancel_prefetch() -> None`: what was announced and not asked for yet will not be: the loader goes on elsewhere.
- `retire(count) -> None`: the first `count` samples that were handed out and not yet retired are in use no more. Called
  with 0 before the first sample is asked for.
- `take_stats() -> DataStats`: what was counted in this process since the last call.
- `stream_ids(seed, start, stride, count) -> (epochs, ids)`: the dataset has an order of its own over stream positions;
  both int64 `[count]`.
- `fetch_many(epoch, ids) -> Iterator`: the samples of these ids, one after another, in place of `__getitem__`. An
  iterator that makes each sample when it is asked for: the random numbers of the sample are seeded right before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils.data

from framework.data.stats import DataStats


@dataclass(frozen=True, slots=True)
class Hooks:
    """The optional methods of one dataset; none where it has none. See the module."""

    key_of: Callable[[int], int | str] = int
    prefetch: Callable[[Sequence[int]], None] | None = None
    cancel_prefetch: Callable[[], None] | None = None
    retire: Callable[[int], None] | None = None
    take_stats: Callable[[], DataStats] | None = None
    stream_ids: Callable[[int, int, int, int], tuple[Any, Any]] | None = None
    fetch_many: Callable[[int, Sequence[int]], Iterable[Any]] | None = None


def hooks_of(dataset: Any) -> Hooks:
    """Looks up what a dataset offers."""
    if type(dataset) is torch.utils.data.Subset:
        inner = hooks_of(dataset.dataset)
        # No key: a subset may hold a sample twice, to see it twice as often, and then differently.
        return Hooks(
            prefetch=inner.prefetch and functools.partial(_prefetch_inside, inner.prefetch, dataset.indices),
            cancel_prefetch=inner.cancel_prefetch,
            retire=inner.retire,
            take_stats=inner.take_stats,
        )
    own = functools.partial(_own_method, dataset)
    return Hooks(
        key_of=own("sample_key") or int,
        prefetch=own("prefetch"),
        cancel_prefetch=own("cancel_prefetch"),
        retire=own("retire"),
        take_stats=own("take_stats"),
        stream_ids=own("stream_ids"),
        fetch_many=own("fetch_many"),
    )


def _own_method(dataset: Any, name: str) -> Any:
    """A method of the dataset itself, or none: what `__getattr__` hands on is that of another one, with its indices."""
    if name not in getattr(dataset, "__dict__", {}) and not hasattr(type(dataset), name):
        return None
    method = getattr(dataset, name)
    return method if callable(method) else None


def _prefetch_inside(prefetch: Callable[[Sequence[int]], None], inside: Sequence[int], indices: Sequence[int]) -> None:
    prefetch([int(inside[index]) for index in indices])
