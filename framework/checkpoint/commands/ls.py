"""`ls`: which checkpoints a run has, here and in its remote place.

Guarantee: nothing is changed, and torch is not needed. Damaged ones are listed with what is wrong, as far as manifests
and sizes tell. A remote place that cannot be reached is said to be so; the local ones are listed then.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.errors import EXIT_DONE, EXIT_ERROR, CheckpointError, FrameworkError

if TYPE_CHECKING:
    from framework.checkpoint.commands.places import Run
    from framework.checkpoint.remote.listing import Copy
    from framework.checkpoint.remote.tiers import Candidate

HELP = "the checkpoints of a run, newest first, with what is wrong with damaged ones"
EXAMPLES = ("ls runs/digits", "ls runs/digits --json", "ls s3://bucket/runs/digits")
MORE = """Listed are manifests and file sizes; `verify --full` compares every byte. The remote place is the one in the
run's config. Exit code: 0; 1 if a published one is damaged, or the run cannot be read."""
SET_ASIDE = "set aside"
_COLUMNS = (">step", "state", ">age", ">size", "metrics", "health", "tier", "pinned", "reason")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory, or the folder or URL of its remote checkpoints")
    parser.add_argument("--step", type=int, help="only the checkpoint of this step")
    parser.add_argument("--local", action="store_true", help="do not ask the remote place")
    parser.add_argument("--json", action="store_true", help="print JSON: a list, newest first")


def run(arguments: argparse.Namespace) -> int:
    from framework.speaking import print_json, say

    rows = _rows(arguments)
    if arguments.step is not None:
        steps = ", ".join(dict.fromkeys(str(row["step"]) for row in rows)) or "none"
        rows = [row for row in rows if row["step"] == arguments.step]
        if not rows:
            raise CheckpointError(f"{arguments.run} has no checkpoint of step {arguments.step}. There are: {steps}.")
    if arguments.json:
        print_json(rows)
    elif rows:
        _print(rows, arguments.run)
    else:
        say(f"{arguments.run} has no published checkpoint. If it is itself one, `show` and `verify` take it.")
    return EXIT_ERROR if any(row["damage"] and row["tier"] != SET_ASIDE for row in rows) else EXIT_DONE


def _rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from framework.checkpoint.commands.places import RETRY_SECONDS, has_checkpoints, is_url, open_run
    from framework.checkpoint.remote.listing import Listing
    from framework.checkpoint.remote.tiers import LOCAL, merge
    from framework.volume import open_volume

    if has_checkpoints(arguments.run):
        copies = Listing(open_volume(arguments.run, retry_seconds=RETRY_SECONDS)).copies()
        here = {} if is_url(arguments.run) else {"tier": LOCAL}  # a folder is as near as the caller has it
        return [_row(one, None, is_pinned=False) | here for one in merge([], copies)]
    found = open_run(arguments.run)
    local = found.store.list()
    copies = [] if arguments.local else _remote_copies(found)
    pinned = found.store.pinned()
    return [_row(one, found, is_pinned=one.step in pinned) for one in merge(local, copies)] + _set_aside(found)


def _remote_copies(found: Run) -> list[Copy]:
    """What lies in the remote place; if that cannot be told, this is said."""
    from framework.checkpoint.remote.listing import Listing
    from framework.speaking import note

    try:
        volume = found.remote()
        if volume is None:
            return []
        if volume.path is not None and not volume.path.parent.is_dir():
            raise CheckpointError(f"{volume.path.parent} is not there. Is it mounted?")
        return Listing(volume).copies()
    except FrameworkError as error:
        note(f"The remote place cannot be read, so only local checkpoints are listed: {error}")
        return []


def _row(one: Candidate, found: Run | None, *, is_pinned: bool) -> dict[str, Any]:
    here, there = one.local, one.remote
    sides = [side for side in (here, there) if side is not None]
    wheres = [("", here), ("remote: ", there)]
    damages = [f"{where}{side.damage}" for where, side in wheres if side is not None and side.damage is not None]
    row: dict[str, Any] = {
        "step": one.step,
        "path": None if here is None or found is None else str(here.path.relative_to(found.directory.path)),
        "remote": None if there is None else there.place,
        "tier": one.tier,
        "is_same": one.is_same if len(sides) == 2 else None,
        "damage": "; ".join(damages) or None,
    }
    header = next((side.header for side in sides if side.header is not None), None)
    if header is None:
        return row
    names = ("attempt", "position", "epoch", "world_size", "reason", "finished", "health", "created")
    return row | {name: getattr(header, name) for name in names} | {
        "pinned": header.pinned or is_pinned,
        "bytes": header.size,
        "age_seconds": max(0.0, time.time() - header.created),
        "metrics": dict(header.metrics),
    }  # fmt: skip


def _set_aside(found: Run) -> list[dict[str, Any]]:
    """What lies in `damaged/`, with the reason beside it."""
    from framework.checkpoint.store import DAMAGED

    rows = []
    for path in sorted((found.store.path / DAMAGED).glob("step_*"), reverse=True):
        number = path.name.removeprefix("step_").partition("-")[0]
        if path.is_dir() and number.isdecimal():
            place = str(path.relative_to(found.directory.path))
            row = {"step": int(number), "path": place, "remote": None, "tier": SET_ASIDE, "is_same": None}
            rows.append({**row, "damage": _reason(path)})
    return rows


def _reason(path: Path) -> str:
    try:
        lines = path.with_name(f"{path.name}.reason.txt").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return " ".join(lines[2:]) or "no reason is known"


def _print(rows: list[dict[str, Any]], place: str) -> None:
    from framework.speaking import age_text, print_table, size_text

    lines = []
    for row in rows:
        state = f"damaged: {row['damage']}" if row["damage"] else "ok"
        state += "; the remote one is another save" if row["is_same"] is False else ""
        if "created" not in row:
            lines.append([str(row["step"]), state, "", "", "", "", row["tier"], "", ""])
            continue
        numbers = {name: value for name, value in row["metrics"].items() if isinstance(value, int | float)}
        lines.append(
            [
                str(row["step"]), state, age_text(row["created"]), size_text(row["bytes"]),
                ", ".join(f"{name} {value:.5g}" for name, value in numbers.items()), row["health"] or "", row["tier"],
                "yes" if row["pinned"] else "", f"{row['reason']} ({row['finished']})" if row["finished"] else row["reason"],
            ]
        )  # fmt: skip
    print_table(f"Checkpoints of {place}", _COLUMNS, lines)
