"""`report`: where the time of runs went.

Guarantee: nothing is changed.
"""

from __future__ import annotations

import argparse

from framework.errors import EXIT_DONE

HELP = "categories of time, attempts, checkpoints, the biggest losses"
MORE = """examples:
  python -m framework.goodput report runs/toy
  python -m framework.goodput report runs/toy runs/digits --json

Exit code: 0; 1 if a folder holds no run."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", help="run directory, for example runs/toy")
    parser.add_argument("--json", action="store_true", help="machine-readable; one object, or a list for several runs")


def run(arguments: argparse.Namespace) -> int:
    from framework.goodput.reporting.report import build, show
    from framework.speaking import print_json

    reports = [build(run) for run in arguments.run]
    if arguments.json:
        values = [report.to_json() for report in reports]
        print_json(values[0] if len(values) == 1 else values)
        return EXIT_DONE
    for report in reports:
        show(report)
    return EXIT_DONE
