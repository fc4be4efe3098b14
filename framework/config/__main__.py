"""python -m framework.config diff RUN_A RUN_B: the keys that differ between two runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from framework.config.composition import load
from framework.config.diff import differences
from framework.errors import EXIT_DONE, FrameworkError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m framework.config", description="Look at the configs of runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    diff = commands.add_parser("diff", help="print the keys that differ between two runs")
    diff.add_argument("first", metavar="RUN_A", help="a run directory or a config.yaml")
    diff.add_argument("second", metavar="RUN_B", help="another")
    arguments = parser.parse_args(argv)
    try:
        found = differences(load(arguments.first).values, load(arguments.second).values)
    except FrameworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for key, (first, second) in found.items():
        print(f"{key}: {first!r} -> {second!r}")
    if not found:
        print("no differences")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
