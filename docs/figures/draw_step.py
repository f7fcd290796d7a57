"""Draws step.svg: the forward pass of two ranks as tasks on copy agents and math workers.

    python docs/figures/draw_step.py

Lengths are chosen to be read, not measured.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "clowder"  # the same file every time
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of backend)

COLOURS = {
    "stage": "#8da0cb",
    "pull": "#66c2a5",
    "shared": "#ffd92f",
    "up": "#fc8d62",
    "down": "#e78ac3",
    "out": "#a6d854",
    "done": "#b3b3b3",
    "slots": "#e5d8f0",
}
# (start, length, colour, text) of each lane, from the top.
LANES = {
    "rank 0\nslots": [(23, 18, "slots", "y of rank 0's tokens arrives")],
    "rank 0\nmath": [
        (0, 8, "shared", "shared gate/up"),
        (9, 7, "up", "gate/up q0"),
        (16, 7, "up", "gate/up q1"),
        (23, 5, "down", "down q0"),
        (28, 4, "up", "gate/up q2"),
        (32, 5, "down", "down q1"),
        (37, 4, "down", "down q2"),
        (44, 9, "out", "out = shared down + slots"),
    ],
    "rank 0\ncopy": [
        (0, 4, "stage", "stage x"),
        (5, 4, "pull", "pull q0"),
        (9, 5, "pull", "pull q1"),
        (14, 5, "pull", "pull q2"),
        (41, 2.2, "done", "done"),
        (44, 2.2, "done", "finish"),
    ],
    "rank 1\ncopy": [
        (0, 5, "stage", "stage x"),
        (5, 5, "pull", "pull q0"),
        (10, 4, "pull", "pull q1"),
        (39, 2.2, "done", "done"),
        (44, 2.2, "done", "finish"),
    ],
    "rank 1\nmath": [
        (0, 9, "shared", "shared gate/up"),
        (10, 10, "up", "gate/up q0"),
        (20, 7, "up", "gate/up q1"),
        (27, 6, "down", "down q0"),
        (33, 6, "down", "down q1"),
        (44, 9, "out", "out = shared down + slots"),
    ],
    "rank 1\nslots": [(23, 18, "slots", "y of rank 1's tokens arrives")],
}
# (time, lane) -> (time, lane), with what is told and where.
ARROWS = [
    ((4, 2.3), (5, 2.75), ""),
    ((5, 2.75), (5, 2.3), "inputs_ready", (5.4, 2.5)),
    ((9, 1.75), (9, 1.3), "pulled", (9.3, 1.5)),
    ((26, 0.75), (26, 0.3), "push", (26.3, 0.5)),
    ((36, 3.75), (36, 0.3), "push", (36.3, 2.5)),
    ((24.5, 1.3), (24.5, 4.7), "push", (24.8, 2.5)),
    ((30, 4.3), (30, 4.7), "push", (30.3, 4.5)),
    ((41.2, 2.75), (44, 2.3), ""),
    ((43.2, 2.3), (44, 2.75), "done", (44.4, 2.5)),
]


def main() -> None:
    figure, axes = plt.subplots(figsize=(11, 5), layout="constrained")
    for lane, (name, tasks) in enumerate(LANES.items()):
        for start, length, colour, text in tasks:
            axes.barh(-lane, length, left=start, height=0.55, color=COLOURS[colour], edgecolor="white")
            axes.text(start + length / 2, -lane, text.replace(" = ", " =\n"), ha="center", va="center", fontsize=7)
        axes.text(-0.6, -lane, name, ha="right", va="center", fontsize=9)
    for (start, from_lane), (end, to_lane), text, *place in ARROWS:
        style = {"arrowstyle": "->", "color": "black", "linewidth": 0.9}
        axes.annotate("", xy=(end, -to_lane), xytext=(start, -from_lane), arrowprops=style)
        for x, y in place:
            axes.text(x, -y, text, fontsize=7, style="italic", va="center")
    axes.set(xlim=(-5, 54), ylim=(-5.5, 0.5), xlabel="time")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(Path(__file__).with_name("step.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
