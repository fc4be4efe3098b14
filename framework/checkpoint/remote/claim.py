"""Which attempt may publish and delete in a remote place: the one that claimed it last.

Guarantee: a claim is written once, whole, when an attempt begins to train, and never again by that attempt, so that an
older attempt cannot overwrite a newer claim. An attempt whose claim was replaced neither publishes nor deletes, on
whatever host it goes on; neither does one whose claim is gone, since then the place is
not the one it claimed. What cannot be parsed was replaced by nobody.
"""

from __future__ import annotations

import json
import math
import socket
import time
from dataclasses import asdict, dataclass

from framework.errors import CheckpointError
from framework.volume import Volume, VolumeMissing

CLAIM = "claim.json"


@dataclass(frozen=True, slots=True)
class Claim:
    """Who writes a run's remote checkpoints.

    Args:
        run: Name of the run.
        attempt: Number of the attempt; attempts on hosts with run directories of their own count on their own.
        token: Its fencing token.
        host: Where its rank 0 runs.
        time: Wall clock of the claim in seconds since the epoch.
    """

    run: str
    attempt: int
    token: str
    host: str
    time: float

    @classmethod
    def parse(cls, data: bytes) -> Claim | None:
        """The claim in a file; none if it holds none."""
        try:
            claim = cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError):
            return None
        is_sound = (
            all(isinstance(value, str) for value in (claim.run, claim.token, claim.host))
            and type(claim.attempt) is int
            and type(claim.time) in (int, float)
            and math.isfinite(claim.time)
        )
        return claim if is_sound else None

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        return f"attempt {self.attempt} on {self.host}, since {when}"


def read_claim(volume: Volume) -> Claim | None:
    """The claim on a place; none if there is none.

    Raises:
        VolumeError: The place cannot be read.
    """
    try:
        return Claim.parse(volume.read(CLAIM))
    except VolumeMissing:
        return None


def take(volume: Volume, run: str, attempt: int, token: str) -> Claim | None:
    """Claims a place for an attempt.

    Returns:
        The claim of another attempt that this one replaces, if there was one.

    Raises:
        VolumeError: The place cannot be read or written.
    """
    before = read_claim(volume)
    if before is not None and before.token == token:
        return None
    claim = Claim(run, attempt, token, socket.gethostname(), time.time())
    volume.put(CLAIM, json.dumps(asdict(claim)).encode())
    return before


def check(volume: Volume, token: str) -> None:
    """Whether this attempt may still publish and delete.

    Raises:
        CheckpointError: Another attempt claimed the place, or the claim is gone.
        VolumeError: It cannot be read.
    """
    try:
        claim = Claim.parse(volume.read(CLAIM))
    except VolumeMissing as error:
        raise CheckpointError(
            f"{volume.shown(CLAIM)}, which this attempt wrote, is gone: the place was emptied, or is another one by now. "
            f"Nothing is published or deleted there until the run is started again."
        ) from error
    if claim is not None and claim.token != token:
        raise CheckpointError(
            f"superseded: {volume.place} was claimed by {claim}; this attempt neither publishes nor deletes there any "
            f"more. Stop it, or give one of the two runs another run.name."
        )
