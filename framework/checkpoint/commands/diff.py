"""`diff`: whether two checkpoints are equal, bit for bit, however they were sharded.

Guarantee: nothing is changed. Before anything is compared every byte of both is verified, so that damage is never taken
for a difference. NaN equals the same NaN.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from framework.checkpoint.commands.places import CHECKPOINT
from framework.errors import EXIT_DONE, FrameworkError

HELP = "whether two checkpoints are equal, bit for bit"
EXAMPLES = ("diff runs/a runs/b", "diff runs/a@500 s3://bucket/runs/a@500 --tensors")
MORE = """A and B: runs/a and runs/b with or without --step, runs/a@500, or the folder or URL of a checkpoint, also a folder
of torch's own. What lies at a URL is fetched to a temporary folder, see TMPDIR. Tensors are compared whatever ranks and
shards wrote them. The Python values of ranks are compared where both have as many ranks; training time, config and
numbers of ranks and workers are not.
Exit code: 0 equal, 1 different, 2 if that cannot be told."""
EXIT_DIFFERENT, EXIT_TROUBLE = 1, 2
LISTED = 20


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help=CHECKPOINT)
    parser.add_argument("second", metavar="B", help="the other one")
    parser.add_argument("--step", type=int, help="of both, where A and B are runs")
    parser.add_argument("--tensors", action="store_true", help="compare no Python values")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from framework.speaking import note, print_json

    try:
        found = _compare(arguments)
    except FrameworkError as error:
        note(f"error: {error}")
        return EXIT_TROUBLE
    if arguments.json:
        print_json(found)
    else:
        _print(found)
    return EXIT_DONE if found["equal"] else EXIT_DIFFERENT


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    from framework.checkpoint.commands.comparison import compare
    from framework.checkpoint.commands.opened import opened_to_read
    from framework.checkpoint.commands.places import choose

    with contextlib.ExitStack() as stack:
        opened = []
        for text in (arguments.first, arguments.second):
            chosen = choose(text, arguments.step)
            stack.enter_context(chosen.kept())
            opened.append(stack.enter_context(opened_to_read(chosen.place)))
        return compare(opened[0], opened[1], with_values=not arguments.tensors)


def _print(found: dict[str, Any]) -> None:
    from framework.speaking import say

    say(f"A: {found['first']}")
    say(f"B: {found['second']}")
    counts = found["tensors"]
    say(
        f"tensors: {counts['equal']:,} equal, {counts['different']:,} different, {counts['only_in_a']:,} only in A, "
        f"{counts['only_in_b']:,} only in B"
    )
    for number, one in enumerate(found["differences"][:LISTED]):
        say(f"{'first difference:' if number == 0 else ' '} {_difference(one)}")
    _more(found["differences"])
    for side in ("only_in_a", "only_in_b"):
        for key in found[side][:LISTED]:
            say(f"  only in {side[-1].upper()}: {key}")
        _more(found[side])
    for one in found["values"][:LISTED]:
        say(f"  {one['path']}: {one['a']} in A, {one['b']} in B")
    _more(found["values"])
    for text in found["notes"]:
        say(text)
    say("equal" if found["equal"] else "different")


def _more(rows: list[Any]) -> None:
    from framework.speaking import say

    if len(rows) > LISTED:
        say(f"  … and {len(rows) - LISTED:,} more; --json lists all")


def _difference(one: dict[str, Any]) -> str:
    if one["index"] is None:
        return f"{one['key']} is {one['a']} in A and {one['b']} in B"
    bits = f" (bits {one['a_bits']} and {one['b_bits']})" if one["a"] == one["b"] else ""
    return (
        f"{one['key']} {one['index']} is {one['a']} in A and {one['b']} in B{bits}; "
        f"{one['count']:,} of {one['of']:,} elements differ"
    )
