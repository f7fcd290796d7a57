"""The demo trains to the same bits on any number of ranks, and after an interruption."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

train_code_lm = pytest.importorskip("train_code_lm")


@pytest.fixture(autouse=True, scope="module")
def _leave_settings_as_they_were():
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


SMALL = "--steps 8 --layers 2 --width 32 --heads 2 --experts 8 --intermediate 32 --batch 3 --context 32 --threads 2 "
SMALL += "--warmup 2 --validate-every 4 --checkpoint-every 3 --generate-bytes 5 --ngram-buckets 64"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for i in range(60):
        (folder / f"file_{i}.py").write_text("\n".join(f"def function_{i}_{j}():\n    return {j}" for j in range(100)))
    return folder


def run(folder, sources, more=""):
    train_code_lm.main([*SMALL.split(), "--data", str(sources), "--out", str(folder), *more.split()])
    return results(folder)


def results(folder):
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return log, torch.load(folder / "checkpoint.pt")


def assert_same_run(a, b):
    assert [entry["step"] for entry in a[0]] == list(range(1, 9))
    assert a[0] == b[0]
    for name, tensor in a[1]["model"].items():
        assert torch.equal(tensor, b[1]["model"][name]), name


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, sources):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, sources, "--ranks 1")


def test_files_of_a_run(whole_run):
    folder, (log, _) = whole_run
    names = {path.name for path in folder.iterdir()}
    assert names == {"checkpoint.pt", "log.jsonl", "loss.png", "expert_load.png", "sample.txt"}
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert float.fromhex(log[0]["loss_hex"]) == pytest.approx(5.5, abs=0.2)  # ln 256
    assert float.fromhex(log[-1]["loss_hex"]) < float.fromhex(log[0]["loss_hex"])
    assert [sum(layer) for layer in log[0]["expert_counts"]] == [3 * 32 * 2] * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_to_the_same_bits(tmp_path, sources, whole_run, ranks):
    assert_same_run(run(tmp_path, sources, f"--ranks {ranks}"), whole_run[1])


def test_resumed_run_has_the_same_bits(tmp_path, sources, whole_run):
    """Steps after the checkpoint are cut from the log and done again, and the number of ranks may change."""
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, sources, "--stop-after 5")
    assert stop.value.code == 0
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "loss_hex": "0x0"}\n{"step": 7, "los')
    assert_same_run(run(tmp_path, sources, "--resume --ranks 2"), whole_run[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_a_checkpoint(tmp_path, sources, number):
    command = [sys.executable, EXAMPLES / "train_code_lm.py", *SMALL.split(), "--steps", "100000"]
    process = subprocess.Popen([*command, "--data", sources, "--out", tmp_path], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "checkpoint.pt").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    log, checkpoint = results(tmp_path)
    assert log[-1]["step"] == checkpoint["steps_done"]


def test_resume_without_a_checkpoint(tmp_path):
    with pytest.raises(SystemExit, match="no checkpoint"):
        train_code_lm.main(["--resume", "--out", str(tmp_path)])
