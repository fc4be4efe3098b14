"""What a checkpoint says about itself, and the seal that ties its parts together.

Guarantee: format 1 is frozen. Fields that this version does not know are kept when a manifest is read and written
again. Every byte of a checkpoint is covered: `.metadata` ends in a seal with its own checksum and that of the manifest,
the manifest has those of all other files. No name in a manifest can lead out of its folder.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from framework.checkpoint.files import DamagedError, FileRecord, num_pieces
from framework.errors import CheckpointError

FORMAT = 1
METADATA = ".metadata"  # the name torch gives it; a checkpoint exists when this file does

_TAG = re.compile(r"\.(\d{6,})-([0-9a-f]{8})-(\d{6,})\.")


def make_tag(attempt: int, token: str, sequence: int) -> str:
    """What the names of a save's files carry: attempt, a checksum of the owner's token, number of the save in it.

    Two saves never have the same tag, so that a save of a step that is already there never touches its bytes.
    """
    return f"{attempt:06d}-{zlib.crc32(token.encode()):08x}-{sequence:06d}"


def attempt_of(name: str) -> int | None:
    """The attempt that a file name carries, or none if it is not the name of such a file."""
    match = _TAG.search(name)
    return int(match[1]) if match else None


def manifest_name(tag: str) -> str:
    return f"manifest.{tag}.json"


def shared_name(tag: str) -> str:
    return f"shared.{tag}.pt"


def rank_name(rank: int, tag: str) -> str:
    return f"rank_{rank}.{tag}.pt"


def shard_name(rank: int, number: int, tag: str) -> str:
    return f"__{rank}_{number}.{tag}.distcp"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one checkpoint.

    Args:
        run: Name of the run.
        attempt: Attempt that wrote it, from 1.
        token: Fencing token of that attempt.
        step: Completed optimizer steps.
        position: Samples consumed over all epochs.
        epoch: The epoch that `position` lies in.
        skipped: Steps whose update was left out.
        world_size: Number of ranks that wrote it.
        threads: Threads of torch in one process.
        versions: Versions of Python and of libraries, by name.
        reason: Why it was saved.
        metrics: Values by name.
        created: Wall clock in seconds since the epoch.
        files: Every file but `.metadata` and the manifest itself, by name.
        rank_files: The file with a rank's own values, by rank.
        shared_file: The file with the values that all ranks share.
        elapsed_seconds: Training time over all attempts.
        finished: What ended the run, or none if it was not complete.
        health: What is known of the numbers in it, or none.
        tier: Where this copy lies: `local`.
        pinned: Whether retention must keep it for ever.
        unknown: Fields that this version does not know.
    """

    run: str
    attempt: int
    token: str
    step: int
    position: int
    epoch: int
    skipped: int
    world_size: int
    threads: int
    versions: Mapping[str, str]
    reason: str
    metrics: Mapping[str, float]
    created: float
    files: Mapping[str, FileRecord]
    rank_files: Mapping[int, str]
    shared_file: str
    elapsed_seconds: float = 0.0
    finished: str | None = None
    health: str | None = None
    tier: str = "local"
    pinned: bool = False
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def to_bytes(self) -> bytes:
        """The manifest as JSON.

        Raises:
            CheckpointError: A further field has the name of one that exists, or is no JSON value.
        """
        known: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "unknown"}
        known["files"] = {n: {"size": r.size, "crc32": list(r.crc32)} for n, r in self.files.items()}
        known["rank_files"] = {str(rank): name for rank, name in self.rank_files.items()}
        if taken := sorted({"format", *known} & set(self.unknown)):
            raise CheckpointError(f"The manifest's own fields cannot be given as further ones: {', '.join(taken)}.")
        try:
            return json.dumps({"format": FORMAT, **known, **self.unknown}, indent=1).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"A field of the checkpoint's manifest is no JSON value: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Reads and checks a manifest.

        Raises:
            DamagedError: Not a manifest; the message names the field.
            CheckpointError: Of a later format than this version reads.
        """
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"the manifest is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise DamagedError("the manifest is not a JSON object")
        number = _typed(value, "format", int)
        if number > FORMAT:
            raise CheckpointError(
                f"The checkpoint has format {number}; this version reads up to {FORMAT}. Use the version that wrote it."
            )
        known = {name: _typed(value, name, kind) for name, kind in _KINDS.items() if name in value or name in _NEEDED}
        known["files"] = {_inside(name): _record(name, entry) for name, entry in known["files"].items()}
        known["rank_files"] = {_rank(rank): _inside(name) for rank, name in known["rank_files"].items()}
        for name in [*known["rank_files"].values(), _inside(known["shared_file"])]:
            if name not in known["files"]:
                raise DamagedError(f"the manifest names {name} without its size and checksums")
        unknown = {name: entry for name, entry in value.items() if name not in _KINDS and name != "format"}
        return cls(**known, unknown=unknown)


_NUMBER = (int, float)
_LARGE = 1e12  # seconds: no clock shows as many
_COUNT = 2**63
_FLOAT = sys.float_info.max

_KINDS: dict[str, Any] = {
    "run": str, "attempt": int, "token": str, "step": int, "position": int, "epoch": int, "skipped": int,
    "world_size": int, "threads": int, "versions": dict, "reason": str, "metrics": dict, "created": _NUMBER,
    "files": dict, "rank_files": dict, "shared_file": str, "elapsed_seconds": _NUMBER,
    "finished": (str, type(None)), "health": (str, type(None)), "tier": str, "pinned": bool,
}  # fmt: skip
_NEEDED = frozenset(_KINDS) - {"elapsed_seconds", "finished", "health", "tier", "pinned"}


def _typed(value: dict[str, Any], name: str, kind: Any) -> Any:
    entry = value.get(name)
    if not isinstance(entry, kind) or (isinstance(entry, bool) and kind is not bool):
        raise DamagedError(f"the manifest's field '{name}' is {entry!r:.80}")
    is_absurd = (
        (kind == _NUMBER and not abs(entry) < _LARGE)  # nor is NaN
        or (kind is int and not 0 <= entry < _COUNT)
        or (name == "metrics" and any(isinstance(one, int) and abs(one) > _FLOAT for one in entry.values()))
    )
    if is_absurd:
        raise DamagedError(f"the manifest's field '{name}' is {entry!r:.80}")
    return entry


def _inside(name: Any) -> str:
    """A plain file name; anything that could lead elsewhere is refused."""
    if not isinstance(name, str) or not re.fullmatch(r"[^./\\\0\ud800-\udfff][^/\\\0\ud800-\udfff]*", name):
        raise DamagedError(f"the manifest names a file outside of its folder: {name!r:.120}")
    return name


def _rank(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise DamagedError(f"the manifest has a file for a rank {text!r:.40}")
    return int(text)


def _record(name: str, entry: Any) -> FileRecord:
    match entry:
        case {"size": int(size), "crc32": list(sums)} if (
            size >= 0 and len(sums) == num_pieces(size) and all(isinstance(s, int) for s in sums)
        ):
            return FileRecord(size, tuple(sums))
    raise DamagedError(f"the manifest's size and checksums of {name} are {entry!r:.80}")


@dataclass(frozen=True, slots=True)
class Seal:
    """The last line of `.metadata`: torch's own reader stops before it.

    Args:
        manifest: Name of the manifest file.
        manifest_crc32: Checksum of the manifest.
        metadata_crc32: Checksum of the bytes before the seal.
    """

    manifest: str
    manifest_crc32: int
    metadata_crc32: int

    def to_bytes(self) -> bytes:
        record = [FORMAT, self.manifest, f"{self.manifest_crc32:08x}", f"{self.metadata_crc32:08x}"]
        return b"\n" + json.dumps({"seal": record}, separators=(",", ":")).encode() + b"\n"


def seal(pickled: bytes, name: str, manifest: bytes) -> bytes:
    """The bytes of `.metadata`: torch's pickled record, and the seal."""
    return pickled + Seal(name, zlib.crc32(manifest), zlib.crc32(pickled)).to_bytes()


def unseal(data: bytes) -> tuple[bytes, Seal]:
    """The pickled record of a `.metadata` and its seal.

    Raises:
        DamagedError: The seal is missing or broken, or the record is not the sealed one.
    """
    begin = data.rfind(b"\n", 0, -1)
    try:
        match json.loads(data[begin:]):
            case {"seal": [int(), str(name), str(manifest), str(metadata)]}:
                found = Seal(name, int(manifest, 16), int(metadata, 16))
            case _:
                raise ValueError("no seal")
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{METADATA} has no seal at its end: it is cut off, damaged, or not ours") from error
    pickled = data[:begin]
    if found.to_bytes() != data[begin:] or zlib.crc32(pickled) != found.metadata_crc32:
        raise DamagedError(f"{METADATA} is damaged (checksum differs)")
    _inside(found.manifest)
    return pickled, found
