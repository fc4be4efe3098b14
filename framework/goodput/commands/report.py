"""`report`: where the time of runs went.

Guarantee: nothing is changed but for the files that are asked for; a report that cannot be written costs one line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from framework.errors import EXIT_DONE
from framework.goodput.commands.written import writing

if TYPE_CHECKING:
    from framework.goodput.reporting.report import Report

HELP = "categories of time, attempts, checkpoints, the biggest losses; with pictures as report.html"
MORE = """examples:
  python -m framework.goodput report runs/toy                       also writes runs/toy/report.html
  python -m framework.goodput report runs/toy --html /tmp/toy.html
  python -m framework.goodput report runs/toy runs/digits --html both.html --json
  python -m framework.goodput report runs/toy --png toy.png

Exit code: 0; 1 if a folder holds no run, or a file that was asked for cannot be written."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", help="run directory, for example runs/toy")
    parser.add_argument("--json", action="store_true", help="machine-readable; one object, or a list for several runs")
    html = parser.add_mutually_exclusive_group()
    html.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="where the pictures go; default: RUN/report.html, of several the first",
    )
    html.add_argument("--no-html", action="store_true", help="no pictures; with --json that is the default")
    parser.add_argument("--png", metavar="FILE", type=Path, help="a picture for papers, one column a run")


def run(arguments: argparse.Namespace) -> int:
    from framework.goodput.reporting.comparison import compare
    from framework.goodput.reporting.report import build, show
    from framework.speaking import print_json

    reports = [build(run) for run in arguments.run]
    if arguments.json:
        values = [report.to_json() for report in reports]
        print_json(values[0] if len(values) == 1 else values)
    elif len(reports) == 1:
        show(reports[0])
    else:
        compare(reports)
    _write_html(arguments, reports)
    if arguments.png is not None:
        from framework.goodput.reporting import png

        with writing(arguments.png):
            png.save(reports, arguments.png)
    return EXIT_DONE


def _write_html(arguments: argparse.Namespace, reports: Sequence[Report]) -> None:
    from framework.goodput.reporting import html
    from framework.speaking import note, say

    if arguments.no_html or (arguments.json and arguments.html is None):
        return
    if arguments.html is not None:
        path = arguments.html
        with writing(path):
            html.save(reports, path)
    else:
        path = Path(arguments.run[0]) / html.FILE_NAME
        try:
            html.save(reports, path)
        except OSError as error:
            note(f"no pictures: {path} cannot be written ({error.strerror or error}); --html FILE puts them elsewhere")
            return
    if not arguments.json:
        say(f"pictures: {path}")
