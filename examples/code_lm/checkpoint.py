"""Checkpoints that a run resumes from to the same bits, and the log that shows it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


class RunFolder:
    """A run's files: checkpoint.pt, log.jsonl, and whatever else is put into `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint_path = path / "checkpoint.pt"
        self.log_path = path / "log.jsonl"
        path.mkdir(parents=True, exist_ok=True)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Writes beside the old one, then takes its name, so that one whole checkpoint exists at any time."""
        partial = self.checkpoint_path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.checkpoint_path)

    def load_checkpoint(self) -> dict[str, Any]:
        if not self.checkpoint_path.exists():
            raise SystemExit(f"{self.checkpoint_path}: no checkpoint to resume from")
        return torch.load(self.checkpoint_path, weights_only=True)

    def start_log(self, steps_done: int) -> list[dict[str, Any]]:
        """Cuts the log to the steps that a checkpoint has seen, and returns these. A new run removes an old checkpoint."""
        if steps_done == 0:
            self.checkpoint_path.unlink(missing_ok=True)
        kept = [entry for entry in self.read_log() if entry["step"] <= steps_done] if steps_done else []
        self.log_path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        return kept

    def read_log(self) -> list[dict[str, Any]]:
        if not self.log_path.exists():
            return []
        lines = self.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def append_log(self, entry: dict[str, Any]) -> None:
        with self.log_path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
