"""`plan`: what failures would cost a job of some size, and how often it should save.

Guarantee: needs no run; nothing is written but the files that are asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from framework.errors import EXIT_DONE
from framework.goodput.commands.written import writing
from framework.goodput.planning import options

if TYPE_CHECKING:
    from framework.goodput.planning.plan import Plan

HELP = "what failures would cost a job of some size, and how often it should save"
MORE = """examples:
  python -m framework.goodput plan --gpus 16384 --rate llama3 --stall 15 --persist 120 --restart 600
  python -m framework.goodput plan --gpus 1024 --rate 1%/yr --days 30 --interval 2h --price 2.50
  python -m framework.goodput plan --gpus 16384 --png plan.png

Times are seconds, or 90s, 10min, 2h. Exit code: 0; 1 if an option makes no sense or a file cannot be written."""


def add(parser: argparse.ArgumentParser) -> None:
    options.add(parser)
    parser.add_argument("--price", help="of a GPU-hour, to say what is wasted in money")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--png", metavar="FILE", type=Path, help="a picture; .svg and .pdf too")
    parser.add_argument("--html", metavar="FILE", type=Path, help="figures and picture in one file")


def run(arguments: argparse.Namespace) -> int:
    from framework.goodput.planning.plan import lines_of, remarks, table
    from framework.speaking import print_json, print_table, say

    price = None if arguments.price is None else options.number("--price", arguments.price, above_zero=False)
    plan = options.plan_of(arguments, price)
    if arguments.json:
        print_json(plan.to_json())
    else:
        for line in lines_of(plan):
            say(line)
        print_table("goodput by cluster size and interval", *table(plan))
        for line in remarks(plan):
            say(line)
    _draw(arguments.png, arguments.html, plan)
    return EXIT_DONE


def _draw(picture: Path | None, page: Path | None, plan: Plan) -> None:
    from framework.goodput.planning import pictures

    for path, write in ((picture, pictures.save), (page, pictures.save_page)):
        if path is None:
            continue
        with writing(path):
            write(plan, path)
