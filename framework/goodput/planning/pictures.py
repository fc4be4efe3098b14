"""A plan as a picture, and as one page with its figures.

Guarantee: needs no screen. The page is one file that loads nothing from anywhere.
"""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from typing import Any

from framework.goodput.planning.plan import HOUR, Plan, lines_of, remarks, sizes, table
from framework.rundir import write_whole

SHADES = ("#56B4E9", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#882255")
POINTS = 200
LEAST, MOST = 60.0, 86_400.0
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>Goodput plan</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 24px auto; padding: 0 16px; color: #1a1d21 }}
svg {{ width: 100%; height: auto }} .wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }} td, th {{ padding: 4px 10px; text-align: right }}
tr:nth-child(even) {{ background: #f3f5f7 }} small {{ color: #5a6270 }}
</style>
<h1>{title}</h1>{lines}{picture}
<h2>Goodput by cluster size and interval</h2><div class="wide"><table><tr>{head}</tr>{rows}</table></div>
<p><small>{remarks}</small></p></html>
"""


def save(plan: Plan, path: Path) -> None:
    """Writes the picture; the ending of the name tells the format (`.png`, `.pdf`, `.svg`).

    Raises:
        OSError: It cannot be written.
        ValueError: There is no such format.
    """
    _figure(plan).savefig(path)


def save_page(plan: Plan, path: Path) -> None:
    """Writes the page.

    Raises:
        OSError: It cannot be written.
    """
    drawing = io.StringIO()
    _figure(plan).savefig(drawing, format="svg")
    title, *lines = lines_of(plan)
    columns, rows = table(plan)
    text = PAGE.format(
        title=escape(title),
        lines="".join(f"<p>{escape(line)}</p>" for line in lines),
        picture=drawing.getvalue()[drawing.getvalue().index("<svg") :],
        head="".join(f"<th>{escape(name.removeprefix('>'))}</th>" for name in columns),
        rows="".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows),
        remarks="<br>".join(map(escape, remarks(plan))),
    )
    write_whole(path, text, durable=False)


def _figure(plan: Plan) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _by_interval(left, plan)
    _by_size(right, plan)
    source = plan.rate.source or "given"
    figure.suptitle(f"Goodput, failure rate {plan.rate.text} ({source})", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_ylim(0, 100)
        axes.set_ylabel("goodput (%)")
    return figure


def _by_interval(axes: Any, plan: Plan) -> None:
    steps = [LEAST * (MOST / LEAST) ** (index / (POINTS - 1)) for index in range(POINTS)]
    for one, color in zip(map(plan.sized, sizes(plan)), SHADES * 2, strict=False):
        shares = [100 * one.at(step).goodput for step in steps]
        axes.plot([step / 60 for step in steps], shares, color=color, label=f"{one.gpus:,} GPUs")
        axes.plot([one.best.interval / 60], [100 * one.best.goodput], marker="o", color=color, markersize=5)
    if plan.interval is not None:
        axes.axvline(plan.interval / 60, color="#6B7280", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks([1, 5, 15, 30, 60, 240, 1440], ["1 min", "5", "15", "30", "1 h", "4 h", "24 h"])
    axes.minorticks_off()
    axes.set_title("by time between saves (dot: best)", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="lower left")


def _by_size(axes: Any, plan: Plan) -> None:
    counts = [round(64 * 2 ** (index / 8)) for index in range(8 * 9 + 1)]
    fixed = {f"every {hours:g} h": hours * HOUR for hours in (0.5, 2.0)}
    axes.plot(
        counts, [100 * plan.sized(n).best.goodput for n in counts], color="#009E73", linewidth=2, label="best interval"
    )
    for (name, interval), color in zip(fixed.items(), ("#E69F00", "#D55E00"), strict=True):
        axes.plot(counts, [100 * plan.sized(n).at(interval).goodput for n in counts], color=color, label=name)
    axes.axvline(plan.gpus, color="#6B7280", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([64, 256, 1024, 4096, 16_384, 32_768], ["64", "256", "1,024", "4,096", "16 k", "32 k"])
    axes.minorticks_off()
    axes.set_title("by number of GPUs", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
