"""Draws trace.svg: what each worker of a real step did, from a file that `clowder trace` wrote.

    build/release/clowder trace --ranks 2 --tokens 768 --hidden 512 --intermediate 256 --shared-intermediate 256 \\
        --experts 8 --chunk-rows 128 --pass forward --out trace.json
    python docs/figures/draw_trace.py trace.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "clowder"  # the same file for the same trace
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of backend)

COLOURS = {"copy": "#66c2a5", "wait": "#d9d9d9", "math": "#fc8d62", "epilogue": "#e78ac3", "reduce": "#a6d854"}
PASS = "forward"
POINTS = 1000  # that a reader can tell apart, from left to right


def read_spans(path: Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Stretches (begin, length) in milliseconds of each worker and role, over all ranks; invisible gaps are closed."""
    events = json.loads(path.read_text())["traceEvents"]
    workers = {
        (event["pid"], event["tid"]): event["args"]["name"].split(":")[0]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    spans: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    chosen = [event for event in events if event["ph"] == "X" and event["args"]["pass"] == PASS]
    origin = min(event["ts"] for event in chosen)
    gap = (max(event["ts"] + event["dur"] for event in chosen) - origin) / 1e3 / POINTS
    for event in sorted(chosen, key=lambda event: event["ts"]):
        begin, length = (event["ts"] - origin) / 1e3, event["dur"] / 1e3
        stretches = spans[workers[event["pid"], event["tid"]]][event["cat"]]
        if stretches and begin - sum(stretches[-1]) < gap:
            stretches[-1] = (stretches[-1][0], begin + length - stretches[-1][0])
        else:
            stretches.append((begin, length))
    return spans


def main() -> None:
    spans = read_spans(Path(sys.argv[1]))
    figure, axes = plt.subplots(figsize=(10, 2.6), layout="constrained")
    names = sorted(spans, reverse=True)
    for lane, name in enumerate(names):
        for role, stretches in spans[name].items():
            axes.broken_barh(stretches, (-lane - 0.35, 0.7), facecolors=COLOURS[role], linewidth=0)
    axes.set_yticks([-lane for lane in range(len(names))], names)
    axes.set(xlabel=f"{PASS}, milliseconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(handles, COLOURS, ncols=len(COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(Path(__file__).with_name("trace.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
