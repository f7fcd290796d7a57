"""The benchmark compares equal layers, and its record holds what readers rely on."""

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

layer_cpu = pytest.importorskip("layer_cpu")

SMALL = "--tokens 96 --hidden 64 --intermediate 32 --experts 4 --topk 2 --threads 2 --rounds 3 --block-ms 1"


def test_record(tmp_path):
    path = layer_cpu.main([*SMALL.split(), "--out", str(tmp_path / "folder" / "record.json")])
    record = json.loads(path.read_text())
    for field in ("date", "commit", "cpu", "cores", "instruction_set", "torch"):
        assert record[field], field
    assert record["threads"] == 2
    assert record["load_average"] >= 0
    assert [row["pass"] for row in record["rows"]] == ["forward", "forward+backward"]
    for row in record["rows"]:
        assert (row["T"], row["H"], row["I"], row["E"], row["K"]) == (96, 64, 32, 4, 2)
        assert min(row["clowder_ms"], row["torch_ms"], row["dense_ms"]) > 0
        for name in ("speedup_vs_torch", "clowder_over_dense"):
            low, high = row[f"{name}_spread"]
            assert low <= row[name] <= high
        assert row["clowder_tflops"] == pytest.approx(
            96 * 2 * 64 * 32 * 6 * (3 if "backward" in row["pass"] else 1) / row["clowder_ms"] * 1e-9
        )


@pytest.mark.parametrize("wrong", ["out", "x", "topk_weights", "w13", "w2"])
def test_layers_that_disagree_are_not_timed(wrong):
    data = layer_cpu.Data(layer_cpu.Shape(96, 64, 32, 4, 2))

    def off_by_one_row(data):
        out = layer_cpu.torch_layer(data)
        if wrong == "out":
            return torch.cat([out[1:2], out[1:]])
        leaf = data.leaves[wrong]
        leaf.register_hook(lambda gradient: torch.cat([gradient[1:2], gradient[1:]]))
        return out

    workspace = layer_cpu.clowder.Workspace(64, 32, 4, 2, max_tokens=96, blocks=2)
    right = layer_cpu.clowder_layer(workspace)
    layer_cpu.check_agreement(data, {"clowder": right, "torch": layer_cpu.torch_layer})
    with pytest.raises(SystemExit, match=f"disagree on {wrong}"):
        layer_cpu.check_agreement(data, {"clowder": right, "torch": off_by_one_row})


def test_turns_and_ratios():
    calls = []
    runs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = layer_cpu.time_in_turns(runs, rounds=3, least_ms=0.0)
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    assert layer_cpu.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == (3.0, [2.0, 4.0])


def test_record_path_names_date_machine_and_subject():
    record = {"date": "2026-12-01", "cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"}
    assert layer_cpu.record_path(record, "layer").name == "2026-12-01-intel-xeon-platinum-8481c-cpu-2-70ghz-layer.json"


def test_plot_takes_records_with_and_without_peers(tmp_path):
    plot = pytest.importorskip("plot")
    row = {"pass": "forward", "clowder_ms": 2.0, "torch_ms": 3.0, "dense_ms": 1.0}
    records = [{"date": "2026-12-01", "rows": [row, {"pass": "backward", "clowder_ms": 4.0}]}]
    for index, record in enumerate(records):
        (tmp_path / f"{index}.json").write_text(json.dumps(record))
    plot.main([str(tmp_path / "0.json"), "--out", str(tmp_path / "bench.svg")])
    text = (tmp_path / "bench.svg").read_text()
    assert "<svg" in text
    assert text.count('id="patch_') >= 4  # a bar for each figure that is there
