"""What can be found out about a stream before it is read: whether it splits itself, and what its states are worth.

Guarantee: nothing that is tried here changes what is read later; copies are used, and where there can be none nothing is
tried. The verdict rests on samples that were compared, never on the absence of an attribute.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from framework.data.device import map_tensors
from framework.data.seeding import sample_key, seed_sample
from framework.data.streams.pristine import Pristine
from framework.data.streams.states import capture, prepared, put_back

SAMPLES = 3  # that are compared
USELESS = -1  # in the place of how late a state is: it does not lead back to the next sample


@dataclass(frozen=True, slots=True)
class Probed:
    """What one reader found.

    Args:
        digests: Of its first samples, made with the same random numbers by all readers; empty where they cannot be had.
        late: By how many samples the states are behind, or `USELESS`; none where it was not found out.
    """

    digests: tuple[str, ...] = ()
    late: int | None = None


def probe(pristine: Pristine, seed: int, *, has_state: bool) -> Probed:
    """Reads the first samples of copies of a dataset.

    Args:
        pristine: Gives the copies.
        seed: Seed of the run.
        has_state: Whether its states are tried, too.
    """
    dataset = pristine.spare(0)
    if dataset is None:
        return Probed()
    try:
        generators = prepared(dataset, seed, 0)
        samples = _seeded(iter(dataset), seed, 0)
        digests = [digest(one) for one in _first(samples, SAMPLES - 1)]
        state = capture(dataset, generators) if has_state else None
        digests += [digest(one) for one in _first(samples, 1)]
    except Exception:  # it comes again when the stream is read, and is told then
        return Probed()
    if None in digests:
        return Probed()
    known = tuple(str(one) for one in digests)
    if state is None or len(set(known)) < SAMPLES:
        return Probed(known)
    return Probed(known, _late(pristine, state, known, seed))


def _late(pristine: Pristine, state: bytes, known: Sequence[str], seed: int) -> int:
    """By how many samples a state is behind that was taken after the last but one of `known`."""
    for late in (0, 1):
        place = SAMPLES - 1 - late
        dataset = pristine.spare(0)
        assert dataset is not None
        try:
            put_back(dataset, prepared(dataset, seed, 0), state)
            found = [digest(one) for one in _first(_seeded(iter(dataset), seed, place), 1)]
        except Exception:  # a state that cannot be loaded is of no use
            return USELESS
        if found == [known[place]]:
            return late
    return USELESS


def _seeded(samples: Iterator[Any], seed: int, number: int) -> Iterator[Any]:
    while True:
        seed_sample(sample_key(seed, 0, f"stream/probe/{number}"))
        try:
            yield next(samples)
        except StopIteration:
            return
        number += 1


def _first(samples: Iterator[Any], count: int) -> list[Any]:
    return [sample for _, sample in zip(range(count), samples, strict=False)]


def digest(sample: Any) -> str | None:
    """A hash of what a sample holds; none where it cannot be had."""
    try:
        content = pickle.dumps(map_tensors(sample, _content))
    except Exception:  # something in it cannot be pickled
        return None
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _content(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return tuple(tensor.shape), str(tensor.dtype), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def twins(found: Sequence[Probed]) -> tuple[int, int] | None:
    """Two readers that give the same samples, or none.

    Args:
        found: What each reader found, by number.
    """
    seen: dict[tuple[str, ...], int] = {}
    for number, one in enumerate(found):
        if len(set(one.digests)) < 2:  # one sample, or all alike: that says nothing
            continue
        if one.digests in seen:
            return seen[one.digests], number
        seen[one.digests] = number
    return None


def are_alike(found: Sequence[Probed]) -> bool:
    """Whether all samples of all readers are the same, so that they cannot tell who reads what."""
    everything = {one for each in found for one in each.digests}
    return len(everything) == 1 and sum(bool(each.digests) for each in found) > 1
