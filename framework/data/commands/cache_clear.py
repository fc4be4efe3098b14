"""`cache clear`: deletes datasets from the cache of this host.

Guarantee: what a live process uses stays, unless that is forced. Nothing outside the cache is touched. Killed in
between, it leaves nothing that is used: the rest goes the next time.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from framework.data.commands.cache_ls import add_root, row, users
from framework.errors import EXIT_DONE, EXIT_ERROR, DataError

if TYPE_CHECKING:
    from framework.data.cache.survey import Held

HELP = "delete datasets from the cache; those in use stay"
MORE = """examples:
  python -m framework.data cache clear                   all that no process uses
  python -m framework.data cache clear --dataset 3f2a    one, by the beginning of its fingerprint

With --force also what is in use: a job that reads it then fetches its files again, and may fail if it was about to
open one. Exit code: 0; 1 if something is in use or could not be deleted, or the folder is no cache."""


def add(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.add_argument("--dataset", metavar="FP", help="only this one: the beginning of its fingerprint")
    parser.add_argument("--force", action="store_true", help="delete also what is in use")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from framework.data.cache.local import LocalCache
    from framework.data.cache.survey import survey, trash
    from framework.speaking import note, print_json, progress, say, size_text

    cache = LocalCache(arguments.root)
    chosen = _chosen(survey(cache.layout), arguments.dataset, str(cache.root))
    freed, kept = 0, {}
    if cache.layout.exists():
        cache.prepare()
        with progress("deleting", sum(one.bytes for one in chosen)) as report:
            freed += sum(cache.housekeeping.empty(left) for left in trash(cache.layout))
            for one in chosen:
                try:
                    size = cache.housekeeping.clear(one.folder, force=arguments.force, report=report)
                except OSError as error:
                    kept[one.folder] = f"cannot be deleted: {error.strerror or error}."
                    continue
                if size is None:
                    kept[one.folder] = f"is in use by {users(one) or 'a process that has just begun'}. Wait for it."
                freed += size or 0
    if arguments.json:
        rows = [row(one) | {"kept": kept.get(one.folder)} for one in chosen]
        print_json({"root": str(cache.root), "bytes": freed, "datasets": rows})
    else:
        say(f"{size_text(freed)} were freed: {len(chosen) - len(kept)} of {len(chosen)} datasets in {cache.root}.")
    for one in chosen:
        if one.folder in kept:
            note(f"error: {' '.join(filter(None, (one.fingerprint, one.label)))} {kept[one.folder]}")
    return EXIT_ERROR if kept else EXIT_DONE


def _chosen(held: list[Held], beginning: str | None, root: str) -> list[Held]:
    if beginning is None:
        return held
    chosen = [one for one in held if one.fingerprint.startswith(beginning)]
    exact = [one for one in chosen if one.fingerprint == beginning]
    if len(exact or chosen) == 1:
        return exact or chosen
    known = ", ".join(one.fingerprint for one in chosen or held) or "none"
    raise DataError(
        f"{root} has {len(chosen) or 'no'} datasets that begin with {beginning!r}. {'They are' if chosen else 'There are'}: {known}."
    )
