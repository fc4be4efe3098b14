"""Which files are the shards, and of what kind they are.

Guarantee: all ranks have the same shards, by the bytes of their names. What cannot be read by ranges (compressed tar
files and texts) or is ambiguous is refused with what to do.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import Any

from framework.data.files.listing import listed
from framework.data.files.manifest import Manifest
from framework.data.files.scan import Choice
from framework.data.shards.decoding import AUTO, PARQUET, TAR, TEXT
from framework.errors import ConfigError, DataError, suggest
from framework.volume import Volume

ENDINGS = {
    TAR: (".tar",),
    PARQUET: (".parquet", ".pq"),
    TEXT: (".txt", ".text", ".jsonl", ".ndjson"),
}
_COMPRESSED = re.compile(r"\.(tgz|tbz2?|txz|((tar|txt|text|jsonl|ndjson)\.(gz|bz2|xz|zst|lz4)))$", re.IGNORECASE)
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".tgz", ".tbz", ".tbz2", ".txz")


def check_format(format: str) -> None:
    """Raises:
    ConfigError: There is no such format.
    """
    if format != AUTO and format not in ENDINGS:
        known = (AUTO, *ENDINGS)
        raise ConfigError(f"format={format!r} is none of {', '.join(known)}.{suggest(str(format), known)}")


def shards_of(volume: Volume, format: str, pattern: str | None, timeout_seconds: float) -> tuple[Manifest, str]:
    """The shards below a place, and their format; a collective where the ranks have joined.

    Args:
        volume: Opened at the place.
        format: One of `ENDINGS`, or `auto`.
        pattern: Names that are wanted, with `*` and `?`; default all with the endings of the format.
        timeout_seconds: How long to wait for the first file.

    Raises:
        ConfigError: They are of several formats, or compressed.
        DataError: There are none.
    """
    wanted = [ending for kind, endings in ENDINGS.items() if format in (AUTO, kind) for ending in endings]
    extensions = None if pattern is not None else (*wanted, *_PACKED)
    found = listed(volume, Choice(extensions), timeout_seconds).manifest
    names = [found.name(index) for index in range(len(found))]
    if pattern is not None:
        names = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise DataError(
                f"None of the {len(found):,} files of {volume.place} fits pattern={pattern!r}. The first of them: "
                f"'{found.name(0)}'."
            )
    packed = [name for name in names if _COMPRESSED.search(name)]
    if packed and (pattern is not None or format != PARQUET):
        raise ConfigError(
            f"{len(packed):,} of {len(names):,} shards of {volume.place} are compressed ('{packed[0]}'), and cannot be "
            "read from the middle on a resume. Unpack them (gunzip); what is in them is mostly compressed already."
        )
    names = [name for name in names if pattern is not None or name.lower().endswith(tuple(wanted))]
    if not names:
        raise DataError(
            f"{volume.place} has no shards: no file ends in {', '.join(wanted)}. Give pattern=… and format=…."
        )
    kind = _kind(volume.place, names) if format == AUTO else format
    chosen = set(names)
    return (found if len(names) == len(found) else _only(found, lambda name: name in chosen)), kind


def _kind(place: str, names: list[str]) -> str:
    kinds: dict[str, str] = {}
    for name in names:
        kind = next((kind for kind, ends in ENDINGS.items() if name.lower().endswith(ends)), "")
        kinds.setdefault(kind, name)
    if len(kinds) > 1 or "" in kinds:
        shown = ", ".join(f"'{name}' ({kind or 'not known'})" for kind, name in kinds.items())
        raise ConfigError(f"The format of the shards of {place} is not clear: {shown}. Give format=…, or a pattern=….")
    return next(iter(kinds))


def _only(manifest: Manifest, is_wanted: Callable[[str], bool]) -> Manifest:
    places = [index for index in range(len(manifest)) if is_wanted(manifest.name(index))]

    def of(values: Any) -> list[int]:
        return [int(values[place]) for place in places]

    return Manifest.of(
        manifest.origin, [manifest.raw(place) for place in places], of(manifest.sizes), of(manifest.modified),
        of(manifest.tags),
    )  # fmt: skip
