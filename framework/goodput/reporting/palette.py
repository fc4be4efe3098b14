"""The colours of categories and incidents, the same in every picture.

Guarantee: each category has one colour, wherever it is shown. The most frequent ones have those of Okabe and Ito (2008),
which the colour-blind can tell apart; every colour is also named in a legend or a row.
"""

from __future__ import annotations

CATEGORIES = {
    "productive": "#009E73",
    "lost": "#D55E00",
    "data_wait": "#E69F00",
    "checkpoint": "#0072B2",
    "evaluation": "#56B4E9",
    "warmup": "#F0E442",
    "init": "#CC79A7",
    "restore": "#882255",
    "detect": "#AA4466",
    "down": "#6B7280",
    "queue": "#A9B0BA",
    "paused": "#D3D7DD",
    "other": "#8C7B6B",
}
INCIDENTS = {"failed": "#D55E00", "killed": "#CC79A7", "stopped": "#56B4E9", "save failed": "#0072B2"}
