"""`unpin`: takes the pin of a checkpoint away.

Guarantee: the checkpoint itself stays until retention finds that no rule keeps it.
"""

from __future__ import annotations

import argparse

from framework.checkpoint.commands.pin import add as add
from framework.errors import EXIT_DONE

HELP = "take a pin away"
EXAMPLES = ("unpin runs/digits --step 500",)
MORE = "The checkpoint stays until no rule keeps it. Exit code: 0, also if it was not pinned; 1 if that cannot be done."


def run(arguments: argparse.Namespace) -> int:
    from framework.checkpoint.commands.places import choose_step
    from framework.speaking import answer

    found, step = choose_step(arguments.run, arguments.step)
    was_pinned = found.store.unpin(step)
    what = "is not pinned any more" if was_pinned else "was not pinned"
    facts = {"step": step, "pinned": False, "was_pinned": was_pinned}
    answer(arguments, facts, f"{found.store.folder(step)} {what}.")
    return EXIT_DONE
