"""The colours of categories and incidents, the same in every picture.

Guarantee: no two that stand beside each other look alike to the colour-blind (Okabe and Ito 2008; Tol 2021 beyond its
eight), on a light ground and on a dark one.
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
