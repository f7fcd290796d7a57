"""Times one MoE layer on this machine's CPU: Clowder, PyTorch's grouped_mm, and the bare dense products, in turns.

    python benchmarks/layer_cpu.py --tokens 1024 --hidden 512 --intermediate 512 --experts 16 --topk 2

Each takes a block of at least `--block-ms` in turn, so that whatever else the machine does falls on all of them; ratios
are medians over the rounds. The layers are compared with each other before anything is timed. README.md beside this file
says how to read the record.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import clowder

# One rounding to bf16 errs by 1.66e-3 of a tensor's norm (src/check/bounds.h). Each layer rounds g, u (their errors weigh
# 3.5 in h), h, y and out, and as many values again in backward; PyTorch rounds silu(g) and its gradient as well. 36
# roundings in all bound every tensor; one wrong row of 1024 differs by 4.4e-2.
AGREEMENT = 1.66e-3 * 36**0.5

PASSES = ("forward", "forward+backward")


@dataclass(frozen=True)
class Shape:
    """Of a layer: T tokens, H hidden, I intermediate, E experts, K of a token."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int

    @property
    def name(self) -> str:
        return f"T{self.tokens}-H{self.hidden}-I{self.intermediate}-E{self.experts}-K{self.topk}"


class Data:
    """Random normal data, seeded; weights are leaves."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, generator=generator) * scale).bfloat16()

        self.shape = shape
        self.x = normal(shape.tokens, shape.hidden)
        self.w13 = normal(shape.experts, 2 * shape.intermediate, shape.hidden, scale=shape.hidden**-0.5)
        self.w2 = normal(shape.experts, shape.hidden, shape.intermediate, scale=shape.intermediate**-0.5)
        self.dout = normal(shape.tokens, shape.hidden)
        scores = torch.rand(shape.tokens, shape.experts, generator=generator)
        self.topk_weights, self.topk_idx = torch.topk(scores.softmax(-1), shape.topk)
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {"x": self.x, "topk_weights": self.topk_weights, "w13": self.w13, "w2": self.w2}


def torch_layer(data: Data) -> Tensor:
    """The layer by index_select and grouped_mm in bf16, as PyTorch users write it."""
    topk = data.shape.topk
    experts = data.topk_idx.flatten()
    order = torch.argsort(experts, stable=True)
    ends = torch.bincount(experts, minlength=data.shape.experts).cumsum(0).to(torch.int32)
    rows = data.x.index_select(0, order // topk)
    gate, up = F.grouped_mm(rows, data.w13.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, data.w2.transpose(1, 2), offs=ends)
    slots = y.index_select(0, torch.argsort(order)).view(-1, topk, data.shape.hidden)
    return (slots.float() * data.topk_weights.unsqueeze(-1)).sum(1).bfloat16()


def clowder_layer(workspace: clowder.Workspace) -> Callable[[Data], Tensor]:
    """The layer by `clowder.moe`, its schedule included."""

    def layer(data: Data) -> Tensor:
        return clowder.moe(data.x, data.topk_idx, data.topk_weights, data.w13, data.w2, workspace=workspace)

    return layer


def step(layer: Callable[[Data], Tensor], data: Data, backward: bool) -> Tensor:
    """A forward that saves for backward, and the backward."""
    for leaf in data.leaves.values():
        leaf.grad = None
    out = layer(data)
    if backward:
        out.backward(data.dout)
    return out


def dense_products(shape: Shape, backward: bool) -> Callable[[], None]:
    """One dense product for each of the layer's, with the same number of rows: no routing, no activation, no sum."""
    rows = shape.tokens * shape.topk
    x = torch.randn(rows, shape.hidden).bfloat16()
    h = torch.randn(rows, shape.intermediate).bfloat16()
    gate_up = torch.randn(rows, 2 * shape.intermediate).bfloat16()
    w13 = torch.randn(2 * shape.intermediate, shape.hidden).bfloat16()
    w2 = torch.randn(shape.hidden, shape.intermediate).bfloat16()
    products = [(x, w13.T), (h, w2.T)]
    if backward:  # dh, dx, dW13, dW2
        products += [(x, w2), (gate_up, w13), (gate_up.T, x), (x.T, h)]

    def run() -> None:
        for a, b in products:
            torch.mm(a, b)

    return run


def check_agreement(data: Data, layers: dict[str, Callable[[Data], Tensor]]) -> None:
    """Compares outputs and gradients of the layers.

    Raises:
        SystemExit: if a tensor of one is further than bf16 from another's.
    """
    results = []
    for layer in layers.values():
        out = step(layer, data, backward=True).detach()
        results.append({"out": out} | {name: leaf.grad.clone() for name, leaf in data.leaves.items()})
    first, second = results
    for name, tensor in first.items():
        error = ((tensor.double() - second[name].double()).norm() / second[name].double().norm()).item()
        if not error <= AGREEMENT:
            sys.exit(
                f"layer_cpu: {' and '.join(layers)} disagree on {name}: {error:.2e} apart, at most {AGREEMENT:.2e}"
            )


def block(run: Callable[[], object], least_ms: float) -> float:
    """Milliseconds of one call, over at least `least_ms` of them."""
    calls = 0
    start = time.perf_counter()
    while True:
        run()
        calls += 1
        elapsed = (time.perf_counter() - start) * 1e3
        if elapsed >= least_ms:
            return elapsed / calls


def time_in_turns(runs: dict[str, Callable[[], object]], rounds: int, least_ms: float) -> dict[str, list[float]]:
    """Milliseconds of each, round by round; every second round goes the other way."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        order = list(runs) if index % 2 == 0 else list(reversed(runs))
        for name in order:
            times[name].append(block(runs[name], least_ms))
    return times


def ratio(over: list[float], under: list[float]) -> tuple[float, list[float]]:
    """Median, lowest and highest of the rounds' ratios."""
    ratios = [a / b for a, b in zip(over, under)]
    return statistics.median(ratios), [min(ratios), max(ratios)]


def measure(shape: Shape, threads: int, rounds: int, least_ms: float) -> list[dict[str, object]]:
    """The rows of a shape, one for each pass."""
    workspace = clowder.Workspace(
        shape.hidden, shape.intermediate, shape.experts, shape.topk, max_tokens=shape.tokens, blocks=threads
    )
    data = Data(shape)
    layers = {"clowder": clowder_layer(workspace), "torch": torch_layer}
    check_agreement(data, layers)
    rows = []
    for name in PASSES:
        backward = name != "forward"
        runs = {key: partial(step, layer, data, backward) for key, layer in layers.items()}
        times = time_in_turns(runs | {"dense": dense_products(shape, backward)}, rounds, least_ms)
        over_torch, torch_spread = ratio(times["torch"], times["clowder"])
        over_dense, dense_spread = ratio(times["dense"], times["clowder"])
        products = 6 * shape.tokens * shape.topk * shape.hidden * shape.intermediate * (3 if backward else 1)
        medians = {key: statistics.median(values) for key, values in times.items()}
        rows.append(
            {
                "case": shape.name,
                "pass": name,
                "engine": "cpu",
                "ranks": 1,
                "T": shape.tokens,
                "H": shape.hidden,
                "I": shape.intermediate,
                "E": shape.experts,
                "K": shape.topk,
                "shared": False,
                "clowder_ms": medians["clowder"],
                "dense_ms": medians["dense"],
                "torch_ms": medians["torch"],
                "clowder_over_dense": over_dense,
                "clowder_over_dense_spread": dense_spread,
                "speedup_vs_torch": over_torch,
                "speedup_vs_torch_spread": torch_spread,
                "clowder_tflops": products / medians["clowder"] * 1e-9,
                "rounds": rounds,
            }
        )
        print(
            f"{shape.name} {name}: clowder {medians['clowder']:.1f} ms, torch {medians['torch']:.1f} ms, "
            f"dense {medians['dense']:.1f} ms; torch / clowder {over_torch:.2f} {torch_spread[0]:.2f}-{torch_spread[1]:.2f}"
        )
    return rows


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(": ", 1)[1]
    return "unknown"


def output_of(*command: str) -> str:
    """What a command printed, or nothing where there is none."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit() -> str:
    here = str(Path(__file__).parent)
    changed = output_of("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return output_of("git", "-C", here, "rev-parse", "--short", "HEAD") + ("-changed" if changed else "")


def make_record(rows: list[dict[str, object]], threads: int, load: float) -> dict[str, object]:
    info = output_of(str(Path(clowder.__file__).parent / "bin" / "clowder"), "info", "--json")
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": load,
        "instruction_set": json.loads(info)["cpu"]["instruction_set"] if info else None,
        "torch": torch.__version__,
        "rows": rows,
    }


def record_path(record: dict[str, object], what: str) -> Path:
    machine = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\([^)]*\)", "", str(record["cpu"]).lower())).strip("-")
    return Path(__file__).parent / "results" / f"{record['date']}-{machine}-{what}.json"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of PyTorch, and Clowder's math workers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block-ms", type=float, default=300.0)
    parser.add_argument("--out", type=Path, help="the record; results/<date>-<cpu>-layer.json if not given")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Path:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    shape = Shape(options.tokens, options.hidden, options.intermediate, options.experts, options.topk)
    load = os.getloadavg()[0]
    record = make_record(measure(shape, options.threads, options.rounds, options.block_ms), options.threads, load)
    path = options.out or record_path(record, "layer")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)
    return path


if __name__ == "__main__":
    main()
