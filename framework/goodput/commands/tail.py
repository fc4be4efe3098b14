"""`tail`: follows a run while it trains.

Guarantee: nothing is changed, and the training is not slowed down: only its journal is read.
"""

from __future__ import annotations

import argparse

from framework.errors import EXIT_DONE

HELP = "follow a run: step, goodput, checkpoints, failures"
MORE = """examples:
  python -m framework.goodput tail runs/toy                 until its attempt ends, or Ctrl-C
  python -m framework.goodput tail runs/toy --restarts      over failures and restarts, until it is finished
  python -m framework.goodput tail runs/toy >> toy.log      plain lines

A run that has not begun yet is waited for. Exit code: 0."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory, for example runs/toy; it need not exist yet")
    parser.add_argument("--restarts", action="store_true", help="wait for the next attempt, until the run is finished")


def run(arguments: argparse.Namespace) -> int:
    from framework.goodput.reporting.live import follow

    follow(arguments.run, arguments.restarts)
    return EXIT_DONE
