"""`audit`: whether each sample was trained once per epoch, over all attempts.

Guarantee: nothing is changed. What the logs do not hold is said to be not proved.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from framework.errors import EXIT_DONE, EXIT_ERROR, DataError

if TYPE_CHECKING:
    from framework.data.audit.check import Audit, EpochResult

HELP = "proves that each sample was trained once per epoch, or lists what was repeated and missed"
MORE = """examples:
  python -m framework.train +recipe=toy callbacks.data_position.audit=true
  python -m framework.data audit runs/toy

Steps that a restart or a rollback took back do not count. Exit code: 0 if it is proved; 1 if samples were repeated or
missed, or the logs have holes."""
SHOWN = 10  # ids of one kind that are listed


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print JSON, with all ids")


def run(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from framework.data.audit.check import audit
    from framework.rundir import RunDirectory
    from framework.speaking import print_json, say

    found = RunDirectory(arguments.run)
    if not arguments.run or not found.path.is_dir():
        raise DataError(f"{arguments.run!r} is no directory. Give a run directory, by default runs/<run.name>.")
    result = audit(found.events)
    if arguments.json:
        print_json({"run": str(found.path), "clean": result.is_clean, **asdict(result)})
    else:
        for line in lines(str(found.shown), result):
            say(line)
    return EXIT_DONE if result.is_clean else EXIT_ERROR


def lines(name: str, result: Audit) -> Iterator[str]:
    """The result in words."""
    yield f"{name}: {_count(result.steps, 'step')} in {_count(result.attempts, 'attempt')}"
    several = any(each.dataset for each in result.epochs)
    for each in result.epochs:
        of = f" of dataset {each.dataset}" if several else ""
        yield from _epoch(f"epoch {each.epoch}{of}", each)
    if result.taken_back:
        yield f"{result.taken_back} records of steps that a restart or rollback took back do not count"
    if result.left_out:
        steps = ", ".join(map(str, result.left_out[:SHOWN]))
        yield f"{_count(len(result.left_out), 'step')} left out, as the numbers were not finite: {steps}"
    for gap in result.gaps:
        yield f"not proved: {gap}"
    yield (
        "clean: each sample was trained once per epoch over all attempts" if result.is_clean else "NOT clean: see above"
    )


def _epoch(name: str, each: EpochResult) -> Iterator[str]:
    state = "each once" if not each.repeated else f"{len(each.repeated)} of them more than once"
    over = "" if each.is_over else ", not over yet"
    yield f"{name}: {each.trained:,} of {each.samples:,} samples{over}, {state}"
    for index, places in list(each.repeated.items())[:SHOWN]:
        where = "; ".join(f"attempt {at.attempt}, rank {at.rank}, step {at.step}" for at in places)
        yield f"  repeated: id {index} ({where})"
    if len(each.repeated) > SHOWN:
        yield f"  … and {len(each.repeated) - SHOWN:,} more ids"
    if each.missing:
        yield f"  missed: {_ids(each.missing)}"
    if each.dropped:
        yield f"  {each.dropped} left out by loader.epoch_end=drop"
    if each.damaged:
        yield f"  could not be loaded, so not trained: {_ids(each.damaged)}"


def _ids(ids: list[int]) -> str:
    more = f" … {len(ids):,} in all" if len(ids) > SHOWN else ""
    return f"ids {', '.join(map(str, ids[:SHOWN]))}{more}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
