"""`copy`: one checkpoint to another folder or URL.

Guarantee: every byte is compared with its checksum when it is read, and once more when it has arrived. `.metadata` is
written last, so that no half of a checkpoint is ever there. What an interrupted copy has left is used by the next one;
another checkpoint, and files that are not this one's, are never touched.
"""

from __future__ import annotations

import argparse

from framework.checkpoint.commands.places import CHECKPOINT
from framework.errors import EXIT_DONE

HELP = "a verified copy of a checkpoint to a folder or URL"
EXAMPLES = ("copy runs/digits s3://bucket/kept/digits-best", "copy s3://bucket/runs/digits /data/digits --step 500")
MORE = """DST becomes the checkpoint's own folder: a path, s3://bucket/prefix, gs://, az://. Started again, it goes on
where it was interrupted. Exit code: 0 if DST holds the checkpoint, 1 if not."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help=CHECKPOINT)
    parser.add_argument("target", metavar="DST", help="a new folder or URL; or one of an interrupted copy")
    parser.add_argument("--step", type=int, help="the checkpoint of this step of SRC")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from framework.checkpoint.commands.opened import open_checkpoint
    from framework.checkpoint.commands.places import choose
    from framework.checkpoint.commands.transfer import transfer
    from framework.speaking import answer, size_text

    chosen = choose(arguments.source, arguments.step)
    with chosen.kept():
        copied, size = transfer(open_checkpoint(chosen.place), arguments.target)
    text = f"{chosen.place} was in {arguments.target} already: {size_text(size)} verified"
    if copied:
        text = f"{chosen.place} is in {arguments.target}: {size_text(copied)} copied, {size_text(size)} verified"
    answer(arguments, {"from": chosen.place, "to": arguments.target, "bytes": size, "copied_bytes": copied}, text)
    return EXIT_DONE
