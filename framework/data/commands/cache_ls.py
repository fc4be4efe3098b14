"""`cache ls`: which datasets the cache of this host holds, and who uses them.

Guarantee: nothing is changed.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from framework.errors import EXIT_DONE

if TYPE_CHECKING:
    from framework.data.cache.survey import Held

HELP = "the datasets in the cache, with their size, last use, and the processes that use them"
MORE = """examples:
  python -m framework.data cache ls
  python -m framework.data cache ls --root /local_disk0/cache --json

A dataset goes by the beginning of its fingerprint. Processes in other containers are not seen by number.
Exit code: 0; 1 if the folder is no cache."""
_COLUMNS = ("dataset", "source", ">files", ">size", ">last use", "in use by")


def add(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_root(parser: argparse.ArgumentParser) -> None:
    """The option that says which cache is meant."""
    parser.add_argument("--root", metavar="FOLDER", help="the folder of the cache; default the one runs use by default")


def run(arguments: argparse.Namespace) -> int:
    from framework.data.cache.local import LocalCache
    from framework.data.cache.survey import survey, trash
    from framework.speaking import print_json, print_table, say, size_text

    cache = LocalCache(arguments.root)
    held = survey(cache.layout)
    left = len(trash(cache.layout))
    if arguments.json:
        print_json({"root": str(cache.root), **_disk(cache.root), "datasets": [row(one) for one in held]})
        return EXIT_DONE
    if not held:
        say(f"{cache.root} holds no dataset." if cache.layout.exists() else f"There is no cache in {cache.root}.")
    else:
        print_table(f"Cache {cache.root}", _COLUMNS, [_line(one) for one in held])
        disk = _disk(cache.root)
        total = size_text(sum(one.bytes for one in held))
        say(f"{total} in all. {size_text(disk['disk_free'])} of {size_text(disk['disk_bytes'])} of the disk are free.")
    if left:
        say("Some of what was cleared is not deleted yet: `cache clear` or the next job goes on with it.")
    return EXIT_DONE


def row(one: Held) -> dict[str, Any]:
    """A dataset as JSON."""
    return {
        "dataset": one.fingerprint,
        "source": one.label or None,
        "folder": str(one.folder),
        "files": one.files,
        "bytes": one.bytes,
        "transit_bytes": one.transit_bytes,
        "last_use": one.last_use,
        "age_seconds": max(0.0, time.time() - one.last_use),
        "in_use": one.is_in_use,
        "pids": list(one.pids),
    }


def users(one: Held) -> str:
    """Who uses a dataset, in words; empty if nobody does."""
    if one.pids:
        return f"pid {', '.join(str(pid) for pid in one.pids)}"
    if one.is_in_use is None:
        return "not known"
    return "another container" if one.is_in_use else ""


def _line(one: Held) -> list[str]:
    from framework.speaking import age_text, size_text

    age = age_text(one.last_use)
    return [one.fingerprint, one.label, f"{one.files:,}", size_text(one.bytes), age, users(one)]


def _disk(root: os.PathLike[str]) -> dict[str, Any]:
    try:
        found = os.statvfs(root)
    except OSError:
        return {"disk_bytes": None, "disk_free": None}
    return {"disk_bytes": found.f_blocks * found.f_frsize, "disk_free": found.f_bavail * found.f_frsize}
