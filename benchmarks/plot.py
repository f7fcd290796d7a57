"""Draws the times of records as bars: Clowder, PyTorch and dense products side by side.

python benchmarks/plot.py benchmarks/results/*.json --out bench.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = {"clowder_ms": "Clowder", "torch_ms": "PyTorch", "dense_ms": "dense products"}


def plot(records: list[dict[str, object]], path: Path) -> None:
    """One group of bars for each row of each record; a column that a row lacks leaves a gap."""
    rows = [(record, row) for record in records for row in record["rows"]]
    figure, axes = plt.subplots(figsize=(2 + 2.2 * len(rows), 4), layout="constrained")
    width = 0.8 / len(COLUMNS)
    for index, (column, label) in enumerate(COLUMNS.items()):
        places = [place for place, (_, row) in enumerate(rows) if row.get(column) is not None]
        bars = axes.bar(
            [place + index * width for place in places],
            [rows[place][1][column] for place in places],
            width,
            label=label,
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    names = [f"{row.get('case', 'layer')}\n{row['pass']}\n{record['date']}" for record, row in rows]
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(rows))], names, fontsize=8)
    axes.set_ylabel("milliseconds")
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench.svg"))
    options = parser.parse_args(arguments)
    plot([json.loads(path.read_text()) for path in options.records], options.out)


if __name__ == "__main__":
    main()
