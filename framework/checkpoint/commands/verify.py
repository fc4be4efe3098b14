"""`verify`: whether checkpoints are whole.

Guarantee: nothing is changed. By default structure and sizes are checked: every file is there in its full size, the
record and the manifest are those that were published, every tensor is covered. With `--full` every byte is compared
with its checksum.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from framework.checkpoint.commands.places import CHECKPOINT
from framework.errors import EXIT_DONE, EXIT_ERROR

if TYPE_CHECKING:
    from framework.checkpoint.commands.places import Chosen

HELP = "whether checkpoints are whole: structure and sizes; with --full every byte"
EXAMPLES = ("verify runs/digits --full", "verify runs/digits@500 --full", "verify s3://bucket/runs/digits --full")
MORE = (
    """Without --step all checkpoints of a run. Exit code: 0 if all are whole; 1 if one is damaged, which is named."""
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=CHECKPOINT.replace("the newest", "all of its checkpoints"))
    parser.add_argument("--step", type=int, help="only the checkpoint of this step")
    parser.add_argument("--full", action="store_true", help="compare every byte with its checksum")
    parser.add_argument("--json", action="store_true", help="print JSON: a list, newest first")


def run(arguments: argparse.Namespace) -> int:
    from framework.checkpoint.commands.places import choose_all
    from framework.speaking import print_json, say

    rows = [_verify(chosen, arguments.full) for chosen in choose_all(arguments.run, arguments.step)]
    if arguments.json:
        print_json(rows)
    elif rows:
        _print(rows, arguments.run)
    else:
        say(f"{arguments.run} has no published checkpoint.")
    return EXIT_ERROR if any(row["damage"] for row in rows) else EXIT_DONE


def _verify(chosen: Chosen, is_full: bool) -> dict[str, Any]:
    from framework.checkpoint.commands.opened import open_checkpoint
    from framework.errors import CheckpointError
    from framework.volume import VolumeError

    began = time.monotonic()
    row: dict[str, Any] = {"step": chosen.step, "place": chosen.place, "damage": None, "kind": None, "checked_bytes": 0}
    try:
        with chosen.kept():
            opened = open_checkpoint(chosen.place)
            row |= {"kind": opened.kind, "step": opened.header.step if opened.header is not None else chosen.step}
            row["has_checksums"] = opened.files is not None
            if is_full:
                row["checked_bytes"] = opened.check(f"verifying {chosen.place}")
    except (CheckpointError, VolumeError) as error:
        row["damage"] = str(error)
    return row | {"full": is_full, "verify_seconds": time.monotonic() - began}


def _print(rows: list[dict[str, Any]], shown: str) -> None:
    from framework.speaking import print_table, size_text

    lines = []
    for row in rows:
        state = "structure and sizes are right"
        if row["damage"]:
            state = f"damaged: {row['damage']}"
        elif not row["has_checksums"]:
            state += "; a stock checkpoint has no checksums"
        elif row["full"]:
            state = f"verified, all {size_text(row['checked_bytes'])}"
        step = "" if row["step"] is None else str(row["step"])
        lines.append([step, state, row["place"], f"{row['verify_seconds']:.1f}"])
    print_table(f"Checkpoints of {shown}", (">step", "state", "place", ">seconds"), lines)
