"""Trains a small byte-level mixture-of-experts language model on Python source code, with expert parallelism.

    python examples/train_code_lm.py                      # a few minutes on two cores
    python examples/train_code_lm.py --ranks 1            # the same losses, bit for bit
    python examples/train_code_lm.py --resume             # goes on after Ctrl-C, to the same bits

It writes to --out: checkpoint.pt; log.jsonl with each step's exact loss (`loss_hex`), so that runs can be compared;
loss.png, expert_load.png and sample.txt.
"""

from __future__ import annotations

import os

# Before PyTorch loads: its threads would spin between operators, and take the cores from the engine's.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import math
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from code_lm.checkpoint import RunFolder
from code_lm.data import Corpus, load_corpus, training_batch, validation_batches
from code_lm.model import CodeModel, ModelConfig
from code_lm.plots import plot_expert_load, plot_loss
from tqdm import tqdm

import clowder

# Options that a resumed run may choose anew: no bit of the result depends on them.
_FREE_WHEN_RESUMED = {"out", "resume", "ranks", "engine", "generate_bytes", "checkpoint_every", "stop_after"}


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="expert-parallel ranks in this process [4]")
    add("--engine", choices=("auto", "cpu"), default="auto", help="auto takes the best one of this machine [auto]")
    add("--steps", type=int, default=400, help="optimizer steps [400]")
    add("--layers", type=int, default=4, help="transformer layers [4]")
    add("--width", type=int, default=128, help="hidden width, a multiple of 32 [128]")
    add("--heads", type=int, default=4, help="attention heads [4]")
    add("--experts", type=int, default=16, help="experts, a multiple of ranks [16]")
    add("--topk", type=int, default=2, help="experts of a token [2]")
    add("--intermediate", type=int, default=128, help="width of an expert, a multiple of 32 [128]")
    add("--shared-intermediate", type=int, default=0, help="width of a shared expert [0, none]")
    add("--ngram-buckets", type=int, default=4096, help="rows of each n-gram embedding [4096]")
    add("--batch", type=int, default=8, help="sequences of a step [8]")
    add("--context", type=int, default=256, help="bytes of a sequence [256]")
    add("--learning-rate", type=float, default=3e-3, help="peak, after the warmup [3e-3]")
    add("--warmup", type=int, default=50, help="steps of linear warmup; cosine decay follows [50]")
    add("--weight-decay", type=float, default=0.1, help="of matrices, not of embeddings [0.1]")
    add("--seed", type=int, default=0, help="of parameters and batches [0]")
    add("--threads", type=int, default=0, help="threads of PyTorch [0, the machine's cores]")
    add("--data", help="folder of .py files [the interpreter's standard library]")
    add("--out", type=Path, default=Path("runs/code_lm"), help="folder of results [runs/code_lm]")
    add("--resume", action="store_true", help="go on from the checkpoint in --out, with its options")
    add("--validate-every", type=int, default=100, help="steps between validations [100]")
    add("--checkpoint-every", type=int, default=100, help="steps between checkpoints [100]")
    add("--stop-after", type=int, default=0, help="stop with a checkpoint after this step, as Ctrl-C does [0, never]")
    add("--generate-bytes", type=int, default=300, help="bytes to sample at the end [300]")
    return parser.parse_args(arguments)


class Trainer:
    """A model, its optimizer and the steps done."""

    def __init__(self, options: argparse.Namespace, corpus: Corpus) -> None:
        self.options = options
        self.corpus = corpus
        self.steps_done = 0
        torch.manual_seed(options.seed)
        tokens = options.batch * options.context
        workspace = clowder.Workspace(
            options.width,
            options.intermediate,
            options.experts,
            options.topk,
            max_tokens=-(-tokens // options.ranks),
            shared_intermediate=options.shared_intermediate,
            group=clowder.VirtualGroup(options.ranks),
        )
        config = ModelConfig(**{field.name: getattr(options, field.name) for field in fields(ModelConfig)})
        self.model = CodeModel(config, workspace)
        self.optimizer = make_optimizer(self.model, options.learning_rate, options.weight_decay)

    def step(self) -> dict[str, Any]:
        """One optimizer step; returns its line of the log."""
        options, step = self.options, self.steps_done
        rate = learning_rate(step, options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = training_batch(self.corpus.train, step, options.seed, options.batch, options.context)
        loss, balance_loss = self.model.losses(*batch)
        (loss + balance_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        return {
            "step": self.steps_done,
            "loss_hex": loss.item().hex(),
            "bits_per_byte": loss.item() / math.log(2),
            "balance_loss": balance_loss.item(),
            "learning_rate": rate,
            "expert_counts": self.model.expert_counts(),
        }

    @torch.no_grad()
    def validate(self, num_bytes: int) -> float:
        """Bits per byte of held-out files."""
        options = self.options
        batches = validation_batches(self.corpus.validation, num_bytes, options.batch, options.context)
        losses = [self.model.losses(*batch)[0].item() for batch in batches]
        return sum(losses) / len(losses) / math.log(2)

    def state(self) -> dict[str, Any]:
        kept = {k: v for k, v in vars(self.options).items() if k not in _FREE_WHEN_RESUMED}
        return {
            "options": kept,
            "steps_done": self.steps_done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps_done = state["steps_done"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def make_optimizer(model: torch.nn.Module, rate: float, weight_decay: float) -> torch.optim.Optimizer:
    decayed = [p for name, p in model.named_parameters() if p.dim() >= 2 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or "embedding" in name]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99), fused=True)


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Linear warmup, then a cosine to a twentieth of the peak."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.learning_rate * (0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * progress)))


class StopRequest:
    """Set by Ctrl-C or SIGTERM, and heeded between steps; a second one ends at once. Use as a context."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> StopRequest:
        self._before = [signal.signal(number, self._on_signal) for number in self._SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _on_signal(self, number: int, _: object) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in zip(self._SIGNALS, self._before, strict=True):
            signal.signal(number, handler)


def train(trainer: Trainer, folder: RunFolder, log: list[dict[str, Any]]) -> None:
    """Runs the steps that are left. Leaves with a checkpoint, and an exit, if it is asked to stop."""
    options = trainer.options
    tokens = options.batch * options.context
    redraw_s = 0.1 if sys.stderr.isatty() else 10.0
    bar = tqdm(total=options.steps, initial=trainer.steps_done, unit="step", dynamic_ncols=True, mininterval=redraw_s)
    with bar, StopRequest() as stop:
        validation = next((entry["validation"] for entry in reversed(log) if "validation" in entry), math.nan)
        began, first_step = time.monotonic(), trainer.steps_done
        while trainer.steps_done < options.steps:
            entry = trainer.step()
            step = trainer.steps_done
            if step % options.validate_every == 0 or step == options.steps:
                validation = entry["validation"] = trainer.validate(32_768)
            folder.append_log(entry)
            log.append(entry)
            speed = (step - first_step) * tokens / (time.monotonic() - began)
            bits = entry["bits_per_byte"]
            bar.set_postfix_str(
                f"{speed:,.0f} tokens/s, {bits:.3f} bits/byte, held out {validation:.3f}", refresh=False
            )
            bar.update()
            is_stopping = stop.signal is not None or step == options.stop_after
            if step % options.checkpoint_every == 0 or step == options.steps or is_stopping:
                folder.save_checkpoint(trainer.state())
            if is_stopping and step < options.steps:
                bar.close()
                print(f"Stopped after step {step}; go on with --resume --out {folder.path}")
                sys.exit(0 if stop.signal is None else 128 + stop.signal)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    folder = RunFolder(options.out)
    state = folder.load_checkpoint() if options.resume else None
    if state is not None:
        vars(options).update(state["options"])
    options.threads = options.threads or os.cpu_count() or 1  # sums are split by threads, so a run keeps their number
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False

    corpus = load_corpus(options.data and Path(options.data))
    try:
        trainer = Trainer(options, corpus)
    except clowder.ClowderError as error:
        raise SystemExit(f"train_code_lm.py: {error}") from None
    if state is not None:
        trainer.load_state(state)
    log = folder.start_log(trainer.steps_done)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters, {options.experts} experts on {options.ranks} ranks of the CPU engine; "
        f"{corpus.num_files} files, {len(corpus.train) / 1e6:.1f} MB to train and "
        f"{len(corpus.validation) / 1e6:.1f} MB held out"
    )

    train(trainer, folder, log)
    print(f"Validation: {trainer.validate(131_072):.4f} bits per byte on held-out files")
    plot_loss(log, folder.path / "loss.png")
    plot_expert_load(log, folder.path / "expert_load.png")
    if options.generate_bytes:
        sample = trainer.model.generate(b"import os\n\n\ndef ", options.generate_bytes, seed=options.seed)
        text = sample.decode("utf-8", errors="replace")
        (folder.path / "sample.txt").write_text(text)
        print(f"A sample:\n\n{text}\n")
    print(f"Plots, log and checkpoint are in {folder.path}")


if __name__ == "__main__":
    main()
