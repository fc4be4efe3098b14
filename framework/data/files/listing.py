"""One listing for all ranks.

Guarantee: every rank gets what rank 0 found, or its error. No rank lists for itself where the ranks have joined, and
none waits without end: rank 0 gives a sign of life while it lists, however long that takes. A process that has not
joined others lists alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils.data

from framework.data.files.scan import Choice, Listing, scan
from framework.distributed import Group, World
from framework.ending import Background
from framework.errors import FrameworkError
from framework.volume import Volume

SIGN_SECONDS = 5.0  # between two signs of life, and two lines of the log
WAIT_SECONDS = 600.0  # for other ranks to make the dataset, too

log = logging.getLogger(__name__)

Found = TypeVar("Found")


def listed(volume: Volume, choice: Choice, timeout_seconds: float) -> Listing:
    """The files of a place, the same on all ranks; a collective where the ranks have joined.

    Args:
        volume: Opened at the place.
        choice: Which files.
        timeout_seconds: How long to wait for the first file.

    Raises:
        DataError: There are no files, or a folder cannot be read.
        VolumeError: The object store cannot be listed.
        DistributedError: The other ranks did not come to list with this one.
    """
    counter = _Counter(volume.place)
    return found_by_one(volume.place, lambda: scan(volume, choice, timeout_seconds=timeout_seconds, report=counter))


def found_by_one(place: str, look: Callable[[], Found]) -> Found:
    """What rank 0 finds, on all ranks; a collective where the ranks have joined.

    Args:
        place: Where it looks, for messages.
        look: Looks; called on rank 0 alone, in a thread of its own where there are others.

    Raises:
        FrameworkError: What `look` raised.
        DistributedError: The other ranks did not come to list with this one.
    """
    group = _group(place)
    if group is None:
        return look()
    found: Found = _lead(group, look) if group.world.is_main else _follow(group)
    return found


class _Counter:
    """Says now and then how many files were found.

    Args:
        place: Where.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._next = time.monotonic() + SIGN_SECONDS

    def __call__(self, count: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SIGN_SECONDS
            log.info("listing %s: %s files so far", self._place, f"{count:,}")


def _lead(group: Group, look: Callable[[], Any]) -> Any:
    """Lists in a thread, while this one keeps the others waiting."""
    outcome: list[tuple[Any]] = []
    failure: list[BaseException] = []
    is_done = threading.Event()

    def work() -> None:
        try:
            outcome.append((look(),))
        except FrameworkError as error:
            outcome.append((error,))
        except BaseException as error:
            failure.append(error)
        finally:
            is_done.set()

    Background(work, "listing").start()
    while not is_done.wait(SIGN_SECONDS):
        group.broadcast(None)
    if failure:
        group.broadcast((FrameworkError(f"Rank 0 could not list the files: {failure[0]!r}"),))
        raise failure[0]
    return _told(group.broadcast(outcome[0]))


def _follow(group: Group) -> Any:
    while (told := group.broadcast(None)) is None:  # a sign of life
        pass
    return _told(told)


def _told(outcome: tuple[Any]) -> Any:
    (value,) = outcome
    if isinstance(value, FrameworkError):
        raise value
    return value


_kept: list[tuple[object, Group]] = []  # of the process group that is joined now, if any


def _group(place: str) -> Group | None:
    """The ranks that list together; none if this process is alone, or a worker, which must not join in."""
    is_joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not is_joined or torch.utils.data.get_worker_info() is not None:
        return None
    world = dist.group.WORLD
    if not _kept or _kept[0][0] is not world:
        place_of_rank = World(dist.get_rank(), dist.get_world_size(), 0, 1, torch.device("cpu"))
        _kept[:] = [(world, Group(place_of_rank, timeout_seconds=WAIT_SECONDS, name=f"listing {place}"))]
    _kept[0][1].name = f"listing {place}"
    return _kept[0][1]
