"""`gc`: removes what unfinished saves left behind, and checkpoints that no rule keeps.

Guarantee: without `--yes` nothing is changed. While a live run owns the directory nothing is removed, and none can
start meanwhile. The newest good checkpoint, pinned ones and those that somebody reads stay.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from framework.errors import EXIT_DONE, EXIT_ERROR, CheckpointError

if TYPE_CHECKING:
    from framework.checkpoint.commands.places import Run
    from framework.checkpoint.removal import Garbage
    from framework.checkpoint.retention import Keep

HELP = "what unfinished saves left and what no rule keeps; with --yes it is removed"
EXAMPLES = ("gc runs/digits", "gc runs/digits --yes")
MORE = """The rules are callbacks.async_checkpoint.keep of the run's config. Of a run with a remote place only left-overs
are listed: which local copies may go, the run itself decides. Exit code: 0; 1 if something could not be removed, or
with --yes a live run owns the directory."""
LOCK_SECONDS = 10.0


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--yes", action="store_true", help="remove it; without this it is only listed")
    parser.add_argument("--keep", type=int, metavar="N", help="keep the newest N, instead of the rules in the config")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from framework.checkpoint.commands.places import open_run
    from framework.checkpoint.garbage import garbage
    from framework.speaking import note, print_json

    found = open_run(arguments.run)
    keep, remark = _rules(found, arguments.keep)
    left: list[str] = []
    if arguments.yes:
        listed, left = _remove(found, keep)
    else:
        listed = garbage(found.store, keep, live_attempt=_live_attempt(found))
    if arguments.json:
        rows = [{"path": str(one.path), "bytes": one.size, "why": one.why} for one in listed]
        print_json({"removed": arguments.yes, "bytes": sum(one.size for one in listed), "items": rows, "failed": left})
    else:
        _print(listed, arguments)
    if remark is not None:
        note(remark)
    for path in left:
        note(f"error: {path} could not be removed")
    return EXIT_ERROR if left else EXIT_DONE


def _rules(found: Run, number: int | None) -> tuple[Keep | None, str | None]:
    """The rules of retention, and a remark; no rules: only left-overs go."""
    from framework.checkpoint.retention import Keep

    if found.options().get("remote") is None:
        return (found.keep() if number is None else Keep.parse(number, key="--keep")), None
    if number is not None:
        raise CheckpointError(
            f"{found.shown} has a remote place, and what is uploaded there decides which local copies may go: the run "
            f"itself removes them. Leave --keep out."
        )
    return None, f"{found.shown} has a remote place: the run itself removes checkpoints. Only left-overs are listed."


def _live_attempt(found: Run) -> int | None:
    owner = found.directory.owner()
    return owner.attempt if owner is not None and owner.is_live and owner.owns(found.directory.path) else None


def _remove(found: Run, keep: Keep | None) -> tuple[list[Garbage], list[str]]:
    """What was removed, and what could not be. No run can start meanwhile."""
    from filelock import FileLock, Timeout

    from framework.checkpoint.garbage import collect, garbage

    found.directory.refuse_live_owner()
    if not found.store.path.is_dir():
        return [], []
    lock = found.directory.path / "owner.lock"
    try:
        with FileLock(lock, timeout=LOCK_SECONDS):
            found.directory.refuse_live_owner()
            before = garbage(found.store, keep)
            removed = collect(found.store, keep)
    except Timeout as error:
        raise CheckpointError(f"{lock} is held by a process that starts there, or removes. Try again.") from error
    except OSError as error:
        raise CheckpointError(f"{lock} cannot be locked: {error.strerror or error}. Nothing was removed.") from error
    gone = {one.path for one in removed}
    return removed, [str(one.path) for one in before if one.path not in gone]


def _print(listed: list[Garbage], arguments: argparse.Namespace) -> None:
    from framework.speaking import print_table, say, size_text

    if not listed:
        say(f"There is nothing to remove in {arguments.run}.")
        return
    total = size_text(sum(one.size for one in listed))
    rows = [[size_text(one.size), one.why, str(one.path)] for one in listed]
    print_table("Removed" if arguments.yes else "What may go", (">size", "why", "path"), rows)
    say(f"{total} were freed." if arguments.yes else f"{total} in all. Nothing was removed: that takes --yes.")
