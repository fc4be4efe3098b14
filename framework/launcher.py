"""Waiting for other ranks while a run starts, under a launcher that may die meanwhile.

Guarantee: `within` returns or raises within its bound, whatever the call does: a call of torch waits for each rank and
each key of the store in turn, so that its own bound holds for each of these waits and not for all. A rank whose
launcher has died (nobody is left to start it again, or to end it) is told so within seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from framework.ending import Background
from framework.errors import DistributedError

T = TypeVar("T")

LOOK_SECONDS = 0.5  # between two looks at whether the launcher lives


class _Parent:
    """The process that started this one, as soon as this could be known."""

    pid = os.getppid()

    @classmethod
    def note(cls) -> None:
        cls.pid = os.getppid()


os.register_at_fork(after_in_child=_Parent.note)


def has_died() -> bool:
    """Whether torchrun started this process and has ended since."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != _Parent.pid


def refuse_orphan(what: str) -> None:
    """Ends a start that nobody waits for.

    Args:
        what: What this process was about to do, for the message: "joining the others".

    Raises:
        DistributedError: The launcher has died.
    """
    if has_died():
        raise DistributedError(
            f"Rank {os.environ.get('RANK', '0')}: the launcher (torchrun, process {_Parent.pid}) ended while this rank "
            f"was {what}, so the run has not begun. Was it killed, or out of memory? Start it again."
        )


def within(work: Callable[[], T], seconds: float, what: str) -> T:
    """What a call that waits for other ranks gives. If it is given up, it goes on in its thread.

    Args:
        work: The call, made in a thread of its own.
        seconds: Its bound.
        what: What this process does by it, for messages: "joining the others".

    Raises:
        DistributedError: It failed, took longer, or the launcher has died.
    """
    refuse_orphan(what)
    values: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            values.append(work())
        except BaseException as error:
            errors.append(error)

    thread = Background(call, what)
    deadline = time.monotonic() + seconds
    thread.start()
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(LOOK_SECONDS, left))
        if not values:
            refuse_orphan(what)  # the store may have gone with the launcher, and an error then tells of that alone
    if values:
        return values[0]
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    came = f": {errors[0]}" if errors else ". Some rank did not come, or was lost: look at the logs of the others."
    raise DistributedError(f"Rank {rank} of {size} failed at {what} within {seconds:g} s{came}") from (
        errors[0] if errors else None
    )
