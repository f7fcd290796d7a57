"""Times one layer on a GPU beside its peers, all in one run.

    python benchmarks/layer_gpu.py --cases dsv3-ep8,qwen3-30b --out benchmarks/results/today.json

For each case: `dense`, cuBLAS on one dense GEMM a product with the same number of rows and nothing else; `clowder`, the
whole layer with its schedule; `torch`, the layer by grouped_mm with a compiled activation. Blocks of at least 300 ms
alternate, because the card settles at its power limit as it does in training; ratios are medians of neighbouring
blocks. Results are compared with fp64 on sampled tokens before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

P = ctypes.c_void_p
I64 = ctypes.c_int64


class Layer(ctypes.Structure):
    _fields_ = (
        [(n, I64) for n in ["hidden", "intermediate", "shared_intermediate", "num_experts", "topk", "max_tokens"]]
        + [(n, I64) for n in ["ring_rows", "saved_rows", "chunk_rows", "blocks"]]
        + [("activation", ctypes.c_char_p)]
    )


class Tensors(ctypes.Structure):
    _fields_ = [
        (n, P)
        for n in [
            "topk_idx",
            "x",
            "topk_weights",
            "w13",
            "w2",
            "shared_w13",
            "shared_w2",
            "out",
            "gate_up",
            "shared_gate_up",
            "schedule",
        ]
    ] + [("tokens", I64)]


@dataclass
class Case:
    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    shared: int = 0


CASES = {
    c.name: c
    for c in [
        Case("dsv3-ep8", 8192, 7168, 2048, 32, 8, 2048),
        Case("dsv3-ep32", 8192, 7168, 2048, 8, 8, 2048),
        Case("qwen3-30b", 16384, 2048, 768, 128, 8),
        Case("qwen3-235b-ep8", 16384, 4096, 1536, 16, 8),
        Case("olmoe-7b", 16384, 2048, 1024, 64, 8),
        Case("gpt-oss-like", 16384, 2880, 2880, 32, 4),
    ]
}


class Clowder:
    """The layer through its C++ library."""

    def __init__(self, lib, case: Case, data, save: bool, options: dict):
        self.lib, self.case, self.data = lib, case, data
        layer = Layer(
            case.hidden, case.intermediate, case.shared, case.experts, case.topk, case.tokens,
            options.get("ring_rows", -1), options.get("saved_rows", -1), options.get("chunk_rows", -1),
            options.get("blocks", -1), b"swiglu",
        )  # fmt: skip
        before = torch.cuda.mem_get_info()[0]
        self.handle = lib.clowder_bench_create(ctypes.byref(layer))
        if not self.handle:
            raise RuntimeError(lib.clowder_bench_error().decode())
        self.schedule = torch.empty(lib.clowder_bench_schedule_words(self.handle), dtype=torch.int32, device="cuda")
        self.out = torch.full((case.tokens, case.hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
        rows = lib.clowder_bench_saved_rows(self.handle)
        self.saved = torch.empty(rows, 2 * case.intermediate, dtype=torch.bfloat16, device="cuda") if save else None
        self.shared_saved = (
            torch.empty(case.tokens, 2 * case.shared, dtype=torch.bfloat16, device="cuda")
            if save and case.shared
            else None
        )
        self.gib = (before - torch.cuda.mem_get_info()[0]) / 2**30

    def arguments(self, i: int) -> Tensors:
        x, idx, weights = self.data.batches[i % len(self.data.batches)]
        d = self.data
        tensors = [idx, x, weights, d.w13, d.w2, d.shared_w13, d.shared_w2, self.out, self.saved, self.shared_saved]
        return Tensors(
            *[None if t is None else t.data_ptr() for t in tensors], self.schedule.data_ptr(), self.case.tokens
        )

    def run(self, i: int, schedule: bool = True, forward: bool = True):
        stream = torch.cuda.current_stream().cuda_stream
        arguments = self.arguments(i)
        if schedule and self.lib.clowder_bench_schedule(self.handle, ctypes.byref(arguments), stream):
            raise RuntimeError(self.lib.clowder_bench_error().decode())
        if forward and self.lib.clowder_bench_forward(self.handle, ctypes.byref(arguments), stream):
            raise RuntimeError(self.lib.clowder_bench_error().decode())

    def check(self):
        torch.cuda.synchronize()
        if self.lib.clowder_bench_check(self.handle):
            raise RuntimeError(self.lib.clowder_bench_error().decode())

    def close(self):
        self.lib.clowder_bench_destroy(self.handle)


class Data:
    def __init__(self, case: Case, batches: int = 2):
        torch.manual_seed(0)
        dev, bf = "cuda", torch.bfloat16

        def weights(*shape):
            w = torch.empty(*shape, device=dev, dtype=bf)
            for part in w.view(-1, shape[-2], shape[-1]):
                part.copy_(torch.randn(*part.shape, device=dev) * shape[-1] ** -0.5)
            return w

        self.batches = []
        for _ in range(batches):
            x = torch.randn(case.tokens, case.hidden, device=dev).to(bf)
            idx = torch.rand(case.tokens, case.experts, device=dev).topk(case.topk, dim=1).indices.contiguous()
            w = torch.rand(case.tokens, case.topk, device=dev)
            self.batches.append((x, idx, w / w.sum(1, keepdim=True)))
        self.w13 = weights(case.experts, 2 * case.intermediate, case.hidden)
        self.w2 = weights(case.experts, case.hidden, case.intermediate)
        self.shared_w13 = weights(2 * case.shared, case.hidden) if case.shared else None
        self.shared_w2 = weights(case.hidden, case.shared) if case.shared else None


class Dense:
    """One dense GEMM a product, as many rows as the layer routes, plus the shared expert's."""

    def __init__(self, case: Case, data: Data):
        rows = case.tokens * case.topk
        bf = {"device": "cuda", "dtype": torch.bfloat16}
        self.a = torch.randn(rows, case.hidden, device="cuda").to(torch.bfloat16)
        self.h = torch.randn(rows, case.intermediate, device="cuda").to(torch.bfloat16)
        self.gate_up = torch.empty(rows, 2 * case.intermediate, **bf)
        self.y = torch.empty(rows, case.hidden, **bf)
        self.case, self.data = case, data
        if case.shared:
            self.shared_gate_up = torch.empty(case.tokens, 2 * case.shared, **bf)
            self.shared_y = torch.empty(case.tokens, case.hidden, **bf)

    def run(self, i: int):
        e = i % self.case.experts
        torch.mm(self.a, self.data.w13[e].t(), out=self.gate_up)
        torch.mm(self.h, self.data.w2[e].t(), out=self.y)
        if self.case.shared:
            n = self.case.tokens
            torch.mm(self.a[:n], self.data.shared_w13.t(), out=self.shared_gate_up)
            torch.mm(self.h[:n], self.data.shared_w2.t(), out=self.shared_y)


@torch.compile(dynamic=False)
def swiglu(gate_up):
    g, u = gate_up.chunk(2, dim=-1)
    return F.silu(g) * u


@torch.compile(dynamic=False)
def weighted_sum(y, weights):
    return (y.float() * weights.unsqueeze(-1)).sum(1).to(torch.bfloat16)


@torch.compile(dynamic=False)
def weighted_sum_shared(y, weights, shared):
    return ((y.float() * weights.unsqueeze(-1)).sum(1) + shared.float()).to(torch.bfloat16)


class Torch:
    """The layer by grouped_mm. What surrounds the products is compiled."""

    def __init__(self, case: Case, data: Data):
        self.case, self.data = case, data

    def run(self, i: int):
        case, d = self.case, self.data
        x, idx, weights = d.batches[i % len(d.batches)]
        flat = idx.flatten()
        order = torch.argsort(flat, stable=True)
        offsets = torch.bincount(flat, minlength=case.experts).cumsum(0).to(torch.int32)
        rows = x.index_select(0, order // case.topk)
        h = swiglu(F.grouped_mm(rows, d.w13.transpose(1, 2), offs=offsets))
        y = F.grouped_mm(h, d.w2.transpose(1, 2), offs=offsets)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        slots = y.index_select(0, place).view(case.tokens, case.topk, case.hidden)
        if case.shared:
            return weighted_sum_shared(slots, weights, swiglu(x @ d.shared_w13.t()) @ d.shared_w2.t())
        return weighted_sum(slots, weights)


def reference(case: Case, data: Data, batch: int, tokens: torch.Tensor) -> torch.Tensor:
    x, idx, weights = data.batches[batch]
    rows = x[tokens].double()

    def expert(w13, w2, a):
        g, u = (a @ w13.double().t()).chunk(2, dim=-1)
        return (F.silu(g) * u) @ w2.double().t()

    out = torch.zeros(len(tokens), case.hidden, dtype=torch.float64, device="cuda")
    for e in idx[tokens].unique().tolist():
        hit, slot = (idx[tokens] == e).nonzero(as_tuple=True)
        out.index_add_(0, hit, expert(data.w13[e], data.w2[e], rows[hit]) * weights[tokens][hit, slot, None].double())
    if case.shared:
        out += expert(data.shared_w13, data.shared_w2, rows)
    return out


def verify(case: Case, data: Data, layer: Clowder):
    digests = []
    for _repeat in range(3):
        layer.out.fill_(float("nan"))
        layer.run(0)
        layer.check()
        digests.append(
            layer.out.view(torch.int16).long().mul(torch.arange(1, case.hidden + 1, device="cuda")).sum().item()
        )
    tokens = torch.randint(case.tokens, (64,), device="cuda")
    want = reference(case, data, 0, tokens)
    error = ((layer.out[tokens].double() - want).norm() / want.norm()).item()
    finite = bool(torch.isfinite(layer.out).all())
    ok = finite and error < 6e-3 and len(set(digests)) == 1
    print(
        f"  check: error {error:.2e}, finite {finite}, repeats identical {len(set(digests)) == 1}: {'ok' if ok else 'BAD'}",
        flush=True,
    )
    return ok


def timed(run, count: int, first: int = 0) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for i in range(count):
        run(first + i)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def alternate(contestants: dict, block_ms: float, rounds: int) -> dict[str, list[float]]:
    counts = {}
    for name, run in contestants.items():
        for i in range(3):
            run(i)
        torch.cuda.synchronize()
        counts[name] = max(3, round(block_ms / timed(run, 3)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(timed(run, counts[name]))
    return times


def ratios(times: dict, of: str, over: str) -> list[float]:
    """Of each block of `of`, against the mean of the blocks of `over` before and after it."""
    others = times[over]
    return [(others[i] + others[min(i + 1, len(others) - 1)]) / 2 / t for i, t in enumerate(times[of])]


def load_library(path: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(path)
    lib.clowder_bench_create.restype = P
    lib.clowder_bench_error.restype = ctypes.c_char_p
    for name in ("schedule_words", "saved_rows"):
        getattr(lib, f"clowder_bench_{name}").restype = I64
        getattr(lib, f"clowder_bench_{name}").argtypes = [P]
    for name in ("schedule", "forward"):
        getattr(lib, f"clowder_bench_{name}").argtypes = [P, ctypes.POINTER(Tensors), P]
    lib.clowder_bench_check.argtypes = [P]
    lib.clowder_bench_destroy.argtypes = [P]
    return lib


def time_case(case: Case, data: Data, layer: Clowder, args) -> dict:
    contestants = {"dense": Dense(case, data).run, "clowder": layer.run}
    if not args.no_torch:
        contestants["torch"] = Torch(case, data).run
    times = alternate(contestants, args.block_ms, args.rounds)
    schedule = alternate({"schedule": lambda i: layer.run(i, forward=False)}, 30, 3)["schedule"]
    layer.check()
    over_dense = ratios(times, "clowder", "dense")
    median = {name: statistics.median(t) for name, t in times.items()}
    flop = 6 * case.tokens * case.hidden * (case.topk * case.intermediate + case.shared)
    row = {
        "case": case.name,
        "pass": "forward",
        "T": case.tokens,
        "H": case.hidden,
        "I": case.intermediate,
        "E": case.experts,
        "K": case.topk,
        "shared": case.shared > 0,
        "clowder_ms": median["clowder"],
        "dense_ms": median["dense"],
        "schedule_ms": statistics.median(schedule),
        "clowder_over_dense": statistics.median(over_dense),
        "clowder_over_dense_spread": [min(over_dense), max(over_dense)],
        "clowder_tflops": flop / median["clowder"] / 1e9,
        "dense_tflops": flop / median["dense"] / 1e9,
        "workspace_and_saved_gib": layer.gib,
    }
    if not args.no_torch:
        row["torch_ms"] = median["torch"]
        row["speedup_vs_torch"] = statistics.median(ratios(times, "clowder", "torch"))
    if args.burst:
        burst = alternate({name: contestants[name] for name in ("dense", "clowder")}, 10, 9)
        row["clowder_over_dense_burst"] = statistics.median(ratios(burst, "clowder", "dense"))
    return row


def describe(row: dict) -> str:
    low, high = row["clowder_over_dense_spread"]
    text = (
        f"{row['case']:16s} dense {row['dense_ms']:7.3f} ms ({row['dense_tflops']:.0f} TFLOP/s)  "
        f"clowder {row['clowder_ms']:7.3f} ms ({row['clowder_tflops']:.0f})  over dense "
        f"{row['clowder_over_dense']:.3f} [{low:.3f} {high:.3f}]  schedule {1e3 * row['schedule_ms']:.0f} us "
        f"({100 * row['schedule_ms'] / row['clowder_ms']:.1f} %)"
    )
    if "clowder_over_dense_burst" in row:
        text += f"  burst {row['clowder_over_dense_burst']:.3f}"
    if "torch_ms" in row:
        text += f"  torch {row['torch_ms']:.3f} ms, {row['speedup_vs_torch']:.2f} times"
    return text


def write_record(path: str, rows: list[dict]):
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits"]
    driver, power = subprocess.check_output(query, text=True).strip().split("\n")[0].split(", ")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "power_limit_w": float(power),
        "rows": rows,
    }
    with open(path, "w") as file:
        json.dump(record, file, indent=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/release/libclowder_bench.so")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--block-ms", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-save", action="store_true", help="inference: g and u are not kept")
    parser.add_argument("--option", action="append", default=[], help="ring_rows, saved_rows, chunk_rows or blocks=N")
    parser.add_argument("--burst", action="store_true", help="also blocks of 10 ms")
    parser.add_argument("--out", help="write a record")
    args = parser.parse_args()
    options = {name: int(value) for name, value in (option.split("=") for option in args.option)}
    lib = load_library(args.library)

    rows, failed = [], False
    for name in args.cases.split(","):
        case = CASES[name]
        data = Data(case)
        layer = Clowder(lib, case, data, not args.no_save, options)
        if verify(case, data, layer):
            rows.append(time_case(case, data, layer, args))
            print(describe(rows[-1]), flush=True)
        else:
            failed = True
        layer.close()
        del data, layer
        torch.cuda.empty_cache()
    if args.out:
        write_record(args.out, rows)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
