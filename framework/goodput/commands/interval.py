"""`interval`: how often a run saves, and why.

Guarantee: nothing is changed.
"""

from __future__ import annotations

import argparse

from framework.errors import EXIT_DONE

HELP = "how often a run saves, why, and what another interval would gain"
MORE = """examples:
  python -m framework.goodput interval runs/toy
  python -m framework.goodput interval runs/toy --rate delta --json

Exit code: 0; 1 if the folder holds no run."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory, for example runs/toy")
    parser.add_argument(
        "--rate", help="failure rate to believe before any failure was seen, as for plan; default: the run's"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    from framework.goodput.planning.explanation import explain, lines_of
    from framework.goodput.planning.rates import parse_rate
    from framework.speaking import answer

    rate = None if arguments.rate is None else parse_rate(arguments.rate)
    found = explain(arguments.run, rate)
    answer(arguments, found.to_json(), *lines_of(found))
    return EXIT_DONE
