"""Source files as bytes, split by whole files into training and validation."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# What a distribution may leave out or add: without these, every interpreter has about the same sources.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_VALIDATION_PERCENT = 8


@dataclass(frozen=True)
class Corpus:
    """Bytes of all files, each closed by a zero byte, as 1-d uint8 tensors."""

    train: Tensor
    validation: Tensor
    num_files: int


def load_corpus(folder: Path | None) -> Corpus:
    """Reads every .py file under `folder`, the running interpreter's standard library if None.

    A file is held out for validation if the hash of its relative path says so: the same files every time.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    paths = [p for p in sorted(folder.rglob("*.py")) if not _SKIPPED_FOLDERS & set(p.relative_to(folder).parts)]
    train, validation = bytearray(), bytearray()
    for path in paths:
        name = path.relative_to(folder).as_posix()
        is_held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < _VALIDATION_PERCENT
        (validation if is_held_out else train).extend(path.read_bytes() + b"\0")
    if min(len(train), len(validation)) < 2_000:
        raise SystemExit(f"{folder}: {len(train)} bytes to train and {len(validation)} to validate on are too few")
    return Corpus(_as_tensor(train), _as_tensor(validation), len(paths))


def training_batch(data: Tensor, step: int, seed: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [batch, context] of a step: windows at random places that depend on seed and step alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(data) - context, (batch,), generator=generator)
    return _windows(data, starts, context)


def validation_batches(data: Tensor, num_bytes: int, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of windows spread evenly over the held-out files, about `num_bytes` in all, the same every time."""
    num_batches = max(1, num_bytes // (batch * context))
    starts = torch.linspace(0, len(data) - context - 1, num_batches * batch).long()
    return [_windows(data, part, context) for part in starts.split(batch)]


def _windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = data[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _as_tensor(text: bytearray) -> Tensor:
    return torch.frombuffer(text, dtype=torch.uint8)
