"""`show`: what is in a checkpoint: keys, shapes, dtypes, who wrote what and where, ties, and its header.

Guarantee: nothing is changed, and no tensor is read. No code from the checkpoint runs.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from framework.checkpoint.commands.places import CHECKPOINT
from framework.errors import EXIT_DONE

if TYPE_CHECKING:
    from framework.checkpoint.commands.opened import Opened

HELP = "what is in a checkpoint: keys, shapes, dtypes, which rank wrote what, ties, its header"
EXAMPLES = ("show runs/digits", "show runs/digits --step 500 --json", "show runs/digits/checkpoints/step_0000000500")
MORE = """Also for checkpoints that torch's own dcp.save wrote. Exit code: 0; 1 if it is damaged or not there."""
KINDS = {
    "run": "of a run", "VolumeWriter": "by VolumeWriter", "stock": "by torch's own writer, without checksums",
}  # fmt: skip
_HEADER = (
    "run", "attempt", "step", "position", "epoch", "skipped", "world_size", "threads", "versions", "reason", "metrics",
    "created", "elapsed_seconds", "finished", "health", "pinned",
)  # fmt: skip
_RANK = re.compile(r"__(\d+)_\d+\.")
_INDENT = "  "


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=CHECKPOINT)
    parser.add_argument("--step", type=int, help="the checkpoint of this step")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from framework.checkpoint.commands.opened import open_checkpoint
    from framework.checkpoint.commands.places import choose
    from framework.speaking import print_json

    chosen = choose(arguments.run, arguments.step)
    with chosen.kept():
        described = describe(open_checkpoint(chosen.place))
    if arguments.json:
        print_json(described)
    else:
        _print(described)
    return EXIT_DONE


def describe(opened: Opened) -> dict[str, Any]:
    """Everything that `show` tells, as JSON values."""
    ties = opened.ties()
    tensors = [_tensor(opened, key, ties.get(key)) for key in opened.ordered()]
    parts: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        top = tensor["path"][0] if len(tensor["path"]) > 1 else tensor["key"].partition(".")[0]
        part = parts.setdefault(top, {"tensors": 0, "bytes": 0})
        part["tensors"] += 1
        part["bytes"] += tensor["bytes"] if tensor["tied_to"] is None else 0
    header = opened.header
    said = {name: getattr(header, name) for name in _HEADER} if header is not None else None
    return {
        "place": opened.place,
        "kind": opened.kind,
        "header": None if said is None or header is None else {**said, "bytes": header.size, **header.unknown},
        "parts": parts,
        "tensors": tensors,
        "values": _values(opened),
        "files": None if opened.files is None else {name: record.size for name, record in opened.files.items()},
    }


def _tensor(opened: Opened, key: str, tied_to: str | None) -> dict[str, Any]:
    from framework.checkpoint.fill import described

    shape, dtype = opened.kind_of(key)
    chunks = [
        {
            "rank": _rank(name), "file": name, "file_offset": offset, "file_bytes": length,
            "offsets": list(chunk.offsets), "sizes": list(chunk.sizes),
        }
        for chunk, (name, offset, length) in zip(described(opened.record, key).chunks, opened.places_of(key), strict=True)
    ]  # fmt: skip
    return {
        "key": key, "path": list(opened.path_of(key)), "shape": list(shape), "dtype": str(dtype).removeprefix("torch."),
        "bytes": opened.size_of(key), "tied_to": tied_to, "chunks": chunks,
    }  # fmt: skip


def _rank(name: str) -> int | None:
    match = _RANK.match(name)
    return int(match[1]) if match else None


def _values(opened: Opened) -> list[dict[str, Any]]:
    """What is no tensor: by part and name, with its Python type."""
    from framework.checkpoint.commands.values import python_values

    rows = []
    for part, value in python_values(opened).items():
        has_names = opened.header is not None and isinstance(value, Mapping)
        for name, one in value.items() if has_names else [("", value)]:
            length = len(one) if isinstance(one, Mapping | list | tuple | str | bytes) else None
            kind = type(one).__name__
            rows.append({"part": part, "name": str(name), "type": kind, "length": length, "text": _short(one)})
    return rows


def _short(value: Any) -> str | None:
    return repr(value) if isinstance(value, bool | int | float | str | None) and len(repr(value)) <= 60 else None


def _print(described: dict[str, Any]) -> None:
    from framework.speaking import say, size_text

    say(f"{described['place']}  ({KINDS[described['kind']]})")
    if described["header"] is not None:
        _print_header(described["header"])
    say("")
    for name, part in described["parts"].items():
        say(f"{name}: {_count(part['tensors'])}, {size_text(part['bytes'])}")
    total = sum(part["bytes"] for part in described["parts"].values())
    say(f"in all: {_count(len(described['tensors']))}, {size_text(total)}")
    say("")
    before: list[str] = []
    for tensor in described["tensors"]:
        folders, name = tensor["path"][:-1], tensor["path"][-1]
        for depth, folder in enumerate(folders):
            if folders[: depth + 1] != before[: depth + 1]:
                say(f"{_INDENT * depth}{folder}")
        say(f"{_INDENT * len(folders)}{name}  {_line(tensor)}")
        before = folders
    _print_values(described["values"])


def _print_header(header: dict[str, Any]) -> None:
    from framework.speaking import age_text, say, size_text

    for name, value in header.items():
        if value is None or value is False or value == {}:
            continue
        text = str(value)
        if name == "created":
            text = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(value))}, {age_text(value)} ago"
        elif name == "bytes":
            text = size_text(value)
        elif isinstance(value, Mapping):
            text = ", ".join(f"{key} {one}" for key, one in value.items())
        say(f"{_INDENT}{name}: {text}")


def _line(tensor: dict[str, Any]) -> str:
    from framework.speaking import size_text

    kind = f"{tensor['dtype']} {tensor['shape']}"
    if tensor["tied_to"] is not None:
        return f"{kind}  tied to {tensor['tied_to']}"
    chunks = tensor["chunks"]
    is_whole = len(chunks) == 1 and chunks[0]["sizes"] == tensor["shape"]
    return f"{kind}  {size_text(tensor['bytes'])}  {', '.join(_chunk_text(chunk, is_whole) for chunk in chunks)}"


def _chunk_text(chunk: dict[str, Any], is_whole: bool) -> str:
    who = chunk["file"] if chunk["rank"] is None else f"rank {chunk['rank']}"
    if is_whole:
        return who
    spans = (f"{first}:{first + count}" for first, count in zip(chunk["offsets"], chunk["sizes"], strict=True))
    return f"{who} [{', '.join(spans)}]"


def _print_values(rows: list[dict[str, Any]]) -> None:
    from framework.speaking import say

    before = None
    for row in rows:
        length = "" if row["length"] is None else f" of {row['length']}"
        text = row["text"] if row["text"] is not None else f"{row['type']}{length}"
        if row["name"] and row["part"] != before:
            say(f"{row['part']}  (Python values)")
        say(f"{_INDENT}{row['name']}  {text}" if row["name"] else f"{row['part']}  {text}")
        before = row["part"]


def _count(number: int) -> str:
    return f"{number:,} tensor{'' if number == 1 else 's'}"
