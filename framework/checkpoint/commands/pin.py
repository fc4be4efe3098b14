"""`pin`: keeps a checkpoint for ever.

Guarantee: no byte of the checkpoint changes: the mark is a file beside it, which moves with the run.
"""

from __future__ import annotations

import argparse

from framework.errors import EXIT_DONE, CheckpointError

HELP = "keep a checkpoint for ever, whatever the rules of retention say"
EXAMPLES = ("pin runs/digits --step 500", "pin runs/digits@500")
MORE = "Exit code: 0; 1 if there is no such checkpoint here."


def add(parser: argparse.ArgumentParser) -> None:
    """The words of `pin`, and of `unpin`."""
    parser.add_argument("run", metavar="RUN", help="a run directory, or RUN@STEP")
    parser.add_argument("--step", type=int, help="which checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from framework.checkpoint.commands.places import choose_step
    from framework.speaking import answer

    found, step = choose_step(arguments.run, arguments.step)
    if step not in {one.step for one in found.store.list()}:
        steps = ", ".join(str(one.step) for one in found.store.list()) or "none"
        raise CheckpointError(f"{found.store.path} has no checkpoint of step {step}. There are: {steps}.")
    found.store.pin(step)
    text = f"{found.store.folder(step)} is pinned: it stays until `unpin {found.shown} --step {step}`."
    answer(arguments, {"step": step, "pinned": True}, text)
    return EXIT_DONE
