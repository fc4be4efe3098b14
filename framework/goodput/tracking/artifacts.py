"""The report of a run as files for a tracking server.

Guarantee: reads the journal and writes into the given folder alone. What cannot be made is left out with a line on the
log: a report that fails never keeps the points of a run from being copied.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path

from framework.rundir import RunDirectory

log = logging.getLogger(__name__)


def write_report(run: RunDirectory, folder: Path) -> list[Path]:
    """Writes the report as `report.json`, with its pictures as `report.html`, and as the terminal shows it `report.txt`.

    Returns:
        The files that were written.
    """
    try:
        from framework.goodput.reporting.html import page
        from framework.goodput.reporting.report import build, show

        report = build(run.path)
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            show(report)
        contents = {
            "report.json": json.dumps(report.to_json(), indent=1, default=str),
            "report.html": page([report]),
            "report.txt": text.getvalue(),
        }
        return [_written(folder / name, content) for name, content in contents.items()]
    except Exception as error:  # whatever is wrong with the report, the points are what matters
        log.warning("no report of %s: %s: %s", run.path, type(error).__name__, error)
        return []


def _written(file: Path, content: str) -> Path:
    file.write_text(content, encoding="utf-8")
    return file
