"""The report as a picture for papers.

Guarantee: needs no screen; the colours and figures are those of the HTML report.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from framework.goodput.reporting import palette
from framework.goodput.reporting.report import Report
from framework.goodput.reporting.words import duration
from framework.speaking import count_text

UNITS = ((2 * 86400.0, "days", 86400.0), (2 * 3600.0, "hours", 3600.0), (120.0, "minutes", 60.0), (0.0, "seconds", 1.0))
STEPS = (("step", "step", "productive", "-"), ("fetch", "waiting for data", "data_wait", "-"))
CHECKPOINTS = (
    ("stall", "stall", "checkpoint", "-"), ("persist", "persist", "checkpoint", "--"), ("age", "age", "lost", "-"),
)  # fmt: skip


def save(reports: Sequence[Report], path: Path) -> None:
    """Writes one picture, one column a run; the ending of the name tells the format (`.png`, `.pdf`, `.svg`).

    Raises:
        OSError: It cannot be written.
        ValueError: There is no such format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0 * len(reports), 8.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(4, len(reports), squeeze=False, gridspec_kw={"height_ratios": (0.9, 2.4, 1.8, 1.8)})
    for column, report in enumerate(reports):
        _timeline(axes[0][column], report)
        _categories(axes[1][column], report)
        _curves(axes[2][column], report.pictures["steps"], "steps", STEPS)
        _curves(axes[3][column], report.pictures["checkpoints"], "checkpoints", CHECKPOINTS)
    figure.savefig(path)


def _timeline(axes: Any, report: Report) -> None:
    unit, length = next((name, size) for least, name, size in UNITS if report.goodput.wall >= least)
    bars: dict[str, list[tuple[float, float, float, float]]] = {}
    for cell in report.pictures["timeline"]:
        whole, low = sum(cell["seconds"].values()) or 1.0, 0.0
        for name in palette.CATEGORIES:
            share = cell["seconds"].get(name, 0.0) / whole
            if share:
                bars.setdefault(name, []).append((cell["start"], cell["end"] - cell["start"], low, share))
                low += share
    for name, found in bars.items():
        starts, widths, lows, shares = zip(*found, strict=True)
        axes.bar(
            [start / length for start in starts], shares, [width / length for width in widths], lows, align="edge",
            color=palette.CATEGORIES[name], linewidth=0,
        )  # fmt: skip
    for one in report.incidents:
        color = palette.INCIDENTS.get(one.kind, palette.INCIDENTS["failed"])
        axes.plot([one.at / length], [1.08], marker="v", color=color, markersize=4, clip_on=False)
    goodput = report.goodput
    name = report.path.name.replace("$", r"\$")  # no formula is meant
    axes.set_title(
        f"{name}: goodput {goodput.ratio:.1%} of {duration(goodput.wall)}, {count_text(goodput.attempts, 'attempt')}",
        loc="left",
        pad=12,
    )
    axes.set(xlim=(0, (goodput.wall or 1.0) / length), ylim=(0, 1), yticks=[], xlabel=f"{unit} since the start")


def _categories(axes: Any, report: Report) -> None:
    wall = report.goodput.wall or 1.0
    ranked = sorted((seconds, name) for name, seconds in report.goodput.seconds.items() if seconds > 0)
    names, seconds = [name for _, name in ranked], [seconds for seconds, _ in ranked]
    bars = axes.barh(names, seconds, color=[palette.CATEGORIES[name] for name in names])
    axes.bar_label(bars, [f"{duration(value)} ({value / wall:.1%})" for value in seconds], padding=3, fontsize=8)
    axes.set(xlabel="seconds", xlim=(0, 1.25 * max(seconds, default=1.0)))
    axes.spines[["top", "right"]].set_visible(False)


def _curves(axes: Any, columns: Any, title: str, shown: Sequence[tuple[str, str, str, str]]) -> None:
    """Bands over steps; `shown` has the name, the words, the category of the colour and the style of each."""
    for name, words, category, style in shown:
        _band(axes, columns, columns[name], words, palette.CATEGORIES[category], style)
    axes.set(xlabel="step", ylabel="seconds")
    axes.set_title(title, loc="left", fontsize=10)
    if columns["first"]:
        axes.set_yscale("log")
        axes.legend(
            frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(shown), borderaxespad=0
        )
    axes.spines[["top", "right"]].set_visible(False)


def _band(axes: Any, columns: Any, values: Any, name: str, color: str, style: str) -> None:
    where = [
        (first + last) / 2 for first, last in zip(columns["first"], columns["last"], strict=True)
    ]  # fmt: skip
    least, middle, most = (
        [float("nan") if value is None else value for value in values[one]] for one in ("min", "median", "max")
    )
    axes.fill_between(where, least, most, color=color, alpha=0.25, linewidth=0)
    axes.plot(where, middle, style, color=color, linewidth=1.2, label=name, marker="." if len(where) <= 60 else None)
