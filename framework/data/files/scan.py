"""Finds the files of a dataset on a volume.

Guarantee: what is found does not depend on the order in which a volume lists, nor on the number of threads. Every wait
is bounded: a listing that does not move for `STALL_SECONDS` is an error that names the folder. What is left out is
counted by reason and shown once; a folder that cannot be read is an error, never a dataset that lacks its files.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import compress

from framework.data.files.manifest import Manifest, bytes_of, nanoseconds, tag_of, text_of
from framework.data.files.source import is_on_disk
from framework.data.files.walk import Found, MissingError, Skipped, walk
from framework.errors import DataError
from framework.volume import Volume

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds between two looks at an empty place
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which files belong to the dataset.

    Args:
        extensions: Endings of their names, in lower case; none: all files.
        recursive: Whether folders within the folders are entered.
        has_classes: Whether the folders of the place are classes: files outside of them do not belong to the dataset,
            unless all files lie outside.
    """

    extensions: tuple[str, ...] | None = None
    recursive: bool = True
    has_classes: bool = False

    @property
    def depth(self) -> int | None:
        """How many folders deep files may lie; none: any number."""
        return None if self.recursive else int(self.has_classes)


@dataclass(frozen=True, slots=True)
class Listing:
    """What a scan found.

    Args:
        manifest: The files.
        classes: Names of the class folders in byte order, those without files too; empty where there are none.
    """

    manifest: Manifest
    classes: list[str] = field(default_factory=list)


def scan(volume: Volume, choice: Choice, *, timeout_seconds: float, report: Callable[[int], None]) -> Listing:
    """Lists a place; while there is nothing, again and again: new files may show late.

    Args:
        volume: Opened at the place.
        choice: Which files.
        timeout_seconds: How long to wait for the first file, and for a file system that fails for a while.
        report: Called with the number of files so far, every few seconds or more often.

    Raises:
        DataError: There are no files, or a folder cannot be read.
        VolumeError: The object store cannot be listed.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = FIRST_PAUSE
    while True:
        collected = _Collected(choice)
        missing: MissingError | None = None
        try:
            for found in _all(volume, choice, collected.skipped, timeout_seconds):
                collected.take(found)
                report(len(collected.names))
        except MissingError as error:
            if is_on_disk(volume.path):
                raise
            missing = error
        listing = collected.listing(volume)
        if len(listing.manifest):
            level = logging.WARNING if collected.skipped.empty else logging.INFO
            log.log(level, "%s", collected.summary(volume.place, listing))
            return listing
        left = deadline - time.monotonic()
        if collected.skipped.others or left <= 0:
            raise missing or DataError(_nothing(volume.place, choice, collected.skipped, timeout_seconds))
        if pause == FIRST_PAUSE:
            log.warning("%s has no files yet; looking again for up to %g s (list_timeout).", volume.place, left)
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)


class _Collected:
    """What one look at a place gave."""

    def __init__(self, choice: Choice) -> None:
        self.skipped = Skipped()
        self.names: list[bytes] = []
        self._choice = choice
        self._sizes, self._modified, self._tags = array("q"), array("q"), array("q")
        self._loose: list[int] = []  # places of the files that lie in no folder
        self._folders: set[bytes] = set()

    def take(self, found: Found) -> None:
        if found.is_folder:
            self._folders.add(found.name)
            return
        if b"/" not in found.name:
            self._loose.append(len(self.names))
        self.names.append(found.name)
        self._sizes.append(found.size)
        self._modified.append(found.modified)
        self._tags.append(found.tag)

    def listing(self, volume: Volume) -> Listing:
        """Sorts it; files outside the class folders are left out, unless there are only such."""
        if not self._choice.has_classes:
            return Listing(self._manifest(volume))
        if len(self._loose) == len(self.names):
            return Listing(self._manifest(volume), [])
        self._leave_out_loose()
        self.skipped.loose = len(self._loose)
        self._folders |= {name.partition(b"/")[0] for name in self.names}
        return Listing(self._manifest(volume), [text_of(name) for name in sorted(self._folders)])

    def _leave_out_loose(self) -> None:
        is_kept = bytearray(b"\1") * len(self.names)
        for place in self._loose:
            is_kept[place] = 0
        self.names = list(compress(self.names, is_kept))
        self._sizes, self._modified, self._tags = (
            array("q", compress(values, is_kept)) for values in (self._sizes, self._modified, self._tags)
        )

    def _manifest(self, volume: Volume) -> Manifest:
        origin = str(volume.path) if volume.path is not None else volume.place
        return Manifest.of(origin, self.names, self._sizes, self._modified, self._tags)

    def summary(self, place: str, listing: Listing) -> str:
        """What is in it and what was left out, in one line."""
        manifest = listing.manifest
        classes = f" in {len(listing.classes):,} classes" if listing.classes else ""
        left_out = f"; left out: {self.skipped}" if str(self.skipped) else ""
        return f"{place}: {len(manifest):,} files{classes}, {manifest.total_bytes:,} bytes{left_out}."


def _all(volume: Volume, choice: Choice, skipped: Skipped, patience_seconds: float) -> Iterator[Found]:
    if volume.path is None:
        return _objects(volume, choice, skipped)
    return walk(volume.path, choice.extensions, choice.depth, skipped, patience_seconds)


def _objects(volume: Volume, choice: Choice, skipped: Skipped) -> Iterator[Found]:
    """Files of an object store, which knows no folders; those that somebody made there are found all the same."""
    endings = None if choice.extensions is None else tuple(map(bytes_of, choice.extensions))
    folders = {bytes_of(name) for name in volume.folders() if not name.startswith(".")} if choice.has_classes else set()
    for folder in folders:
        yield Found(folder, is_folder=True)
    for entry in volume.list():
        name = bytes_of(entry.name)
        if choice.depth is not None and name.count(b"/") > choice.depth:
            continue
        if name.startswith(b".") or b"/." in name:
            skipped.hidden += 1
        elif endings is not None and not name.lower().endswith(endings):
            skipped.others += name not in folders  # the mark of a folder is no file
        elif entry.size == 0:
            skipped.add_empty(name)
        else:
            yield Found(name, entry.size, nanoseconds(entry.modified), tag_of(entry.tag))


def _nothing(place: str, choice: Choice, skipped: Skipped, seconds: float) -> str:
    wanted = f" that end in {', '.join(choice.extensions)}" if choice.extensions is not None else ""
    deep = " directly in it" if choice.depth == 0 else " directly in its folders" if choice.depth else ""
    left_out = f" Left out: {skipped}." if str(skipped) else ""
    waited = "" if skipped.others else f", within {seconds:g} s (list_timeout)"
    return (
        f"{place} has no files{wanted}{deep}{waited}.{left_out} Check the path, the endings (extensions=…) and whether "
        f"the volume is mounted."
    )
