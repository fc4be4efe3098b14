"""`unpin`: takes the pin of a checkpoint away.

Guarantee: the checkpoint itself stays until retention finds that no rule keeps it.
"""

from __future__ import annotations

import argparse

from framework.errors import EXIT_DONE

HELP = "take a pin away"
MORE = "The checkpoint stays until no rule keeps it. Exit code: 0, also if it was not pinned; 1 if that cannot be done."


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory, or RUN@STEP")
    parser.add_argument("--step", type=int, help="which checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from framework.checkpoint.commands.places import choose_step
    from framework.checkpoint.commands.speaking import print_json, say

    found, step = choose_step(arguments.run, arguments.step)
    was_pinned = found.store.unpin(step)
    if arguments.json:
        print_json({"step": step, "pinned": False, "was_pinned": was_pinned})
    else:
        what = "is not pinned any more" if was_pinned else "was not pinned"
        say(f"{found.store.folder(step)} {what}.")
    return EXIT_DONE
