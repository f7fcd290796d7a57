"""What operators find of a workspace: its engine, by a handle.

Operators of torch.library take tensors and plain numbers only. A handle is a 0-d int64 tensor on the CPU, whose value is
the engine's number in this process. As a tensor it is an input of a compiled graph, not a constant of it, so one graph
serves every workspace of equal sizes. Its memory keeps the engine alive: a graph that still holds a handle, or a view of
one, can run its passes, whatever became of the workspace. Handles mean nothing in another process, except a forked one.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import _core
from .errors import argument_error

_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_inherited: list[_core.VirtualWorkspace] = []


class Engine:
    """The sizes of a workspace, and the passes by address (`core`).

    Args:
        device: where tensors live.
        limit_advice: what to do where a call has too many tokens; ends that error's sentence.
        options: of `_core.VirtualWorkspace`, by name.
    """

    def __init__(self, device: torch.device, limit_advice: str, options: dict[str, object]) -> None:
        self.device = device
        self.limit_advice = limit_advice
        self._options = options
        self._skipped_ids = 0
        self._start()
        self.ranks: int = options["ranks"]  # type: ignore[assignment]
        self.hidden: int = options["hidden"]  # type: ignore[assignment]
        self.intermediate: int = options["intermediate"]  # type: ignore[assignment]
        self.num_experts: int = options["num_experts"]  # type: ignore[assignment]
        self.topk: int = options["topk"]  # type: ignore[assignment]
        self.max_tokens: int = options["max_tokens"]  # type: ignore[assignment]
        self.shared_intermediate: int = options["shared_intermediate"]  # type: ignore[assignment]
        self.keep_x: bool = options["keep_x"]  # type: ignore[assignment]
        self.ring_rows: int = self._core.ring_rows
        self.saved_rows: int = self._core.saved_rows
        self.schedule_words: int = self._core.schedule_words

    @property
    def core(self) -> _core.VirtualWorkspace:
        if self._process != os.getpid():
            # Forked: a thread that is not here any more may have been in a pass, and hold the lock of the core for ever. No
            # result depends on what a core holds between passes, so a new one goes on. The old one is never freed.
            _inherited.append(self._core)
            self._start()
        return self._core

    def count_skipped(self, ids: int) -> None:
        """Remembers ids that a schedule skipped."""
        with self._lock:
            self._skipped_ids += ids

    def take_skipped(self) -> int:
        """Ids skipped since the last time."""
        with self._lock:
            skipped = self._skipped_ids
            self._skipped_ids = 0
        return skipped

    def _start(self) -> None:
        self._core = _core.VirtualWorkspace(**self._options)  # type: ignore[arg-type]
        self._process = os.getpid()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        names = ("hidden", "intermediate", "num_experts", "topk", "max_tokens", "shared_intermediate", "ranks")
        return f"a workspace with {', '.join(f'{name}={getattr(self, name)}' for name in names)}"


class _Memory(bytearray):
    """The memory of a handle. The tensors that share it hold it, and it holds the engine."""

    engine: Engine


def make_handle(engine: Engine) -> Tensor:
    """A handle of this engine."""
    number = next(_numbers)
    _engines[number] = engine
    memory = _Memory(number.to_bytes(8, sys.byteorder))
    memory.engine = engine
    # A plain tensor also where a workspace is made under inference mode, fake tensors or another device.
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.int64).reshape(())


def engine_of(handle: Tensor) -> Engine:
    """The engine with this handle.

    Raises:
        ClowderError: "argument" if there is none in this process, or no longer.
    """
    if handle.dtype != torch.int64 or handle.dim() != 0 or handle.device.type != "cpu":
        was = f"{handle.dtype}, shape {list(handle.shape)}, on {handle.device}"
        raise argument_error("workspace", was, "the handle of a clowder.Workspace")
    engine = _engines.get(int(handle))
    if engine is None:
        may_be = "that of a workspace that is still alive in this process"
        raise argument_error("workspace", f"handle {int(handle)}", may_be)
    return engine
