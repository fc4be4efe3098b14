"""The report as one HTML file with pictures, that needs nothing else.

Guarantee: opening it loads nothing from anywhere. Text of a run is shown as text: it is escaped, and the policy in the
page lets no script run but the report's own. A file is written whole or not at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from framework.goodput.reporting import loading, palette
from framework.goodput.reporting.report import Report, build, failure_words, ratios, remarks
from framework.goodput.reporting.words import duration, ranked
from framework.rundir import write_whole
from framework.speaking import strict

FILE_NAME = "report.html"
LIST_LIMIT = 200  # rows of incidents and attempts; all are in --json


def write(run_dir: Path | str, path: Path) -> None:
    """Writes the report of a run.

    Args:
        run_dir: The run directory.
        path: The file; one that is there is replaced.

    Raises:
        DataError: There is no such run.
        OSError: The file cannot be written.
    """
    save([build(run_dir)], path)


def save(reports: Sequence[Report], path: Path) -> None:
    """Writes the report of several runs, one below the other.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(path, page(reports), durable=False)


def page(reports: Sequence[Report]) -> str:
    """The whole file."""
    style, script = _own("report.css"), _own("report.js")
    names = ", ".join(report.path.name for report in reports)
    data = {
        "categories": list(palette.CATEGORIES),
        "colors": palette.CATEGORIES,
        "kinds": palette.INCIDENTS,
        "runs": [{"pictures": one.pictures, "incidents": [asdict(i) for i in one.incidents]} for one in reports],
    }
    # inside <script> only "<" can end or change what is read: JSON has another way to write it
    values = json.dumps(strict(data), separators=(",", ":")).replace("<", "\\u003c")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    body = "\n".join(_run(number, report) for number, report in enumerate(reports))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>goodput of {_text(names)}</title>\n<style>\n{style}</style></head>\n<body><main>\n{body}\n</main>\n"
        f'<script type="application/json" id="data">{values}</script>\n<script>{script}</script>\n</body></html>\n'
    )


def _own(name: str) -> str:
    return (files("framework.goodput.reporting") / name).read_text(encoding="utf-8")


def _text(value: Any) -> str:
    return escape(str(value).encode(errors="replace").decode())


def _run(number: int, report: Report) -> str:
    goodput = report.goodput
    started = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(goodput.started))
    live = " (running)" if report.is_live else ""
    notes = "".join(f'<p class="note">{_text(words)}</p>' for words in remarks(report))
    lasting = f"started {started}, {duration(goodput.wall)} ago" if report.is_live else f"started {started}"
    return f"""<section class="run">
<h1>{_text(report.path.name)}{live}</h1>
<p class="note">{_text(report.path)} · {_text(lasting)}</p>{notes}
<div class="numbers">{"".join(_numbers(report))}</div>
{_losses(report)}
<section class="card"><h2>Timeline of all attempts</h2>
<p class="note">Time since the run started. Drag to zoom, double-click for the whole run; triangles mark incidents. Where steps are
too short to be seen, the height of a colour is its share of the time.</p>
<div class="tools"><button data-do="in" aria-label="zoom in">+</button><button data-do="out" aria-label="zoom out">−</button>
<button data-do="left" aria-label="earlier">◀</button><button data-do="right" aria-label="later">▶</button><button data-do="all">whole run</button></div>
<div class="plot" data-picture="timeline" data-run="{number}"></div>
{_legend(report)}</section>
<div class="pair"><section class="card"><h2>Time per category</h2>
<p class="note">of {duration(goodput.wall)} wall clock</p>{_bars(report)}</section>
<section class="card"><h2>Step time and fetch time</h2>
<p class="note">{_dot(palette.CATEGORIES["productive"])}a step, without evaluation and saves &nbsp;
{_dot(palette.CATEGORIES["data_wait"])}of it waiting for data; line: median, band: least to most</p>
<div class="plot" data-picture="steps" data-label="step time and fetch time" data-run="{number}"></div></section></div>
<section class="card"><h2>Checkpoints</h2><p class="note">{_text(_checkpoints(report))}</p><div class="triple">
{_small(number, "stall", "Stall: how long a save held the steps up")}
{_small(number, "persist", "Persist: from there until it was durable")}
{_small(number, "age", "Age of the one before, when it was replaced")}</div></section>
{_incidents(report)}
{_attempts(report)}
</section>"""


def _numbers(report: Report) -> Iterator[str]:
    goodput = report.goodput
    age = "-" if goodput.checkpoint_age is None else duration(goodput.checkpoint_age)
    for value, words in (
        (f"{goodput.ratio:.1%}", "goodput"),
        (f"{goodput.ratio_durable:.1%}", "durable: safe in a checkpoint"),
        (duration(goodput.wall), "wall clock"),
        (f"{goodput.steps_done:,}", "steps done"),
        (f"{goodput.steps_lost:,}", "steps done twice"),
        (f"{goodput.attempts:,}", "attempt" if goodput.attempts == 1 else "attempts"),
        (age, "age of the newest checkpoint"),
        *((value, words) for words, value in ratios(report)),
    ):
        yield f'<div class="number"><b>{_text(value)}</b><span>{_text(words)}</span></div>'


def _losses(report: Report) -> str:
    goodput = report.goodput
    rows = "".join(
        f"<li>{_dot(palette.CATEGORIES[name])}<b>{_text(name)}: {duration(goodput.seconds[name])} "
        f"({goodput.seconds[name] / goodput.wall:.1%})</b> - {_text(advice)}</li>"
        for name, advice in report.losses
    )
    data = "".join(f'<p class="note">{_text(words)}</p>' for words in loading.sentences(report.data, goodput))
    text = (
        f"<ol>{rows}</ol>"
        if rows
        else f'<p class="note">No category took more than 2 % of {duration(goodput.wall)}.</p>'
    )
    return f'<section class="card"><h2>The biggest losses, and what to do</h2>{text}{data}</section>'


def _dot(color: str) -> str:
    return f'<span class="dot" style="background:{color}"></span>'


def _legend(report: Report) -> str:
    entries = "".join(
        f"<span>{_dot(palette.CATEGORIES[name])}{_text(name)}</span>" for name, _ in ranked(report.goodput)
    )
    kinds = dict.fromkeys(one.kind for one in report.incidents)
    marks = "".join(
        f'<span><span style="color:{palette.INCIDENTS.get(kind, palette.INCIDENTS["failed"])}">▼</span> {_text(kind)}</span>'
        for kind in kinds
    )
    return f'<div class="legend">{entries}{marks}</div>'


def _bars(report: Report) -> str:
    most, wall = max(report.goodput.seconds.values(), default=0) or 1, report.goodput.wall or 1
    rows = "".join(
        f'<tr><td>{_text(name)}</td><td class="bar"><i data-category="{_text(name)}" data-seconds="{seconds!r}" '
        f'style="width:{100 * seconds / most:.4f}%;background:{palette.CATEGORIES[name]}"></i></td>'
        f'<td class="value">{duration(seconds)}</td><td class="value">{seconds / wall:.1%}</td></tr>'
        for name, seconds in ranked(report.goodput)
    )
    return f'<table class="bars">{rows}</table>'


def _small(number: int, name: str, title: str) -> str:
    place = f'<div class="plot" data-picture="{name}" data-label="{name}" data-run="{number}"></div>'
    return f"<div><h3>{title}</h3>{place}</div>"


def _checkpoints(report: Report) -> str:
    goodput = report.goodput
    failed = f", {goodput.failed_saves:,} failed" if goodput.failed_saves else ""
    newest = "" if goodput.committed_step is None else f"; the newest at step {goodput.committed_step:,}"
    return f"{goodput.commits:,} committed{failed}{newest}"


def _incidents(report: Report) -> str:
    found = report.incidents
    head = '<section class="card"><h2>Incidents</h2><p class="note">What went wrong, when, and what starting again cost</p>'
    head += "".join(f"<p>{_text(words)}</p>" for words in failure_words(report.failures))
    if not found:
        return f"{head}<p>None.</p></section>"
    rows = [
        (
            duration(one.at), one.attempt, one.kind, _step(one.step), _step(one.resumed), f"{one.lost_steps:,}",
            duration(one.lost_seconds), duration(one.detect_seconds + one.down_seconds), one.cause,
        )
        for one in found
    ]  # fmt: skip
    columns = (
        ">after", ">attempt", "what", ">at step", ">resumed from", ">steps lost", ">redone work", ">until restart", "cause",
    )  # fmt: skip
    return f"{head}{_list(columns, rows)}</section>"


def _attempts(report: Report) -> str:
    rows = [
        (
            a.attempt, a.host, a.world_size or "?", _step(a.first), _step(a.last), duration(a.seconds), a.ended, a.message
        )
        for a in report.attempts
    ]  # fmt: skip
    columns = (">attempt", "host", ">ranks", ">first step", ">last step", ">time", "ended", "message")
    return f'<details class="card"><summary>Attempts ({len(rows):,})</summary>{_list(columns, rows)}</details>'


def _step(step: int | None) -> str:
    return "-" if step is None else f"{step:,}"


def _list(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of the first rows; columns whose names begin with `>` are aligned to the right, the last one is long."""
    kinds = [' class="value"' if name.startswith(">") else "" for name in columns[:-1]] + [' class="long"']
    names = [_text(name.removeprefix(">")) for name in columns]
    head = "".join(f"<th{kind}>{name}</th>" for name, kind in zip(names, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{kind} data-label="{name}">{_text(value)}</td>'
            for name, kind, value in zip(names, kinds, row, strict=True)
        )
        + "</tr>"
        for row in rows[:LIST_LIMIT]
    )
    more = len(rows) - LIST_LIMIT
    rest = f'<p class="note">and {more:,} more, in report --json</p>' if more > 0 else ""
    return f'<div class="scroll"><table class="list"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{rest}'
