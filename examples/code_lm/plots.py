"""Pictures of a run: its loss, and how evenly its experts are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def plot_loss(log: list[dict[str, Any]], path: Path) -> None:
    """Bits per byte over steps: each step's, their running mean, and validation."""
    steps = [entry["step"] for entry in log]
    bits = np.array([entry["bits_per_byte"] for entry in log])
    validation = [(entry["step"], entry["validation"]) for entry in log if "validation" in entry]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(steps, bits, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot(steps, _running_mean(bits, 25), color="tab:blue", label="training, mean of 25")
    if validation:
        axes.plot(*zip(*validation), color="tab:orange", marker="o", label="held-out files")
        axes.set_ylim(0.95 * min(bits.min(), validation[-1][1]), min(bits.max(), 5.0))
    axes.set(xlabel="step", ylabel="bits per byte", title="Byte-level MoE language model on Python source")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_expert_load(log: list[dict[str, Any]], path: Path) -> None:
    """For each layer, each expert's share of the slots over the run."""
    counts = np.array([entry["expert_counts"] for entry in log], dtype=float)  # [steps, layers, E]
    shares = counts / counts.sum(axis=2, keepdims=True)
    _, layers, num_experts = shares.shape
    figure, rows = plt.subplots(
        layers, 1, figsize=(8, 1.2 + 1.3 * layers), sharex=True, squeeze=False, layout="constrained"
    )
    for layer, axes in enumerate(rows[:, 0]):
        extent = (log[0]["step"], log[-1]["step"] + 1, num_experts - 0.5, -0.5)
        image = axes.imshow(
            shares[:, layer].T * num_experts, aspect="auto", extent=extent, vmin=0, vmax=2, cmap="coolwarm"
        )
        axes.set_ylabel(f"layer {layer}\nexpert")
    rows[-1, 0].set_xlabel("step")
    rows[0, 0].set_title("Load of each expert (1 = its even share)")
    figure.colorbar(image, ax=rows[:, 0].tolist())
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    total = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return (total[ends] - total[begins]) / (ends - begins)
