"""The engines of Clowder, by address. Use the package clowder instead. The extension's sources are python/bindings/."""

import enum
from collections.abc import Sequence

class GradientMode(enum.Enum):
    WRITE_BF16 = ...
    WRITE_FP32 = ...
    ACCUMULATE_BF16 = ...
    ACCUMULATE_FP32 = ...

class Matrices:
    def __init__(self, addresses: Sequence[int] = ..., stride: int = ...) -> None: ...
    @property
    def addresses(self) -> list[int]: ...
    @property
    def stride(self) -> int: ...

class WeightAddresses:
    def __init__(
        self,
        w1: Matrices,
        w3: Matrices,
        w2: Matrices,
        shared_w1: Matrices,
        shared_w3: Matrices,
        shared_w2: Matrices,
    ) -> None: ...

class SavedAddresses:
    def __init__(self, gate_up: int = 0, x: int = 0, shared_gate_up: int = 0) -> None: ...

class GradientAddresses:
    def __init__(
        self,
        x: int,
        topk_weights: int,
        w1: Matrices,
        w3: Matrices,
        w2: Matrices,
        shared_w1: Matrices,
        shared_w3: Matrices,
        shared_w2: Matrices,
    ) -> None: ...

class PassAddresses:
    def __init__(
        self,
        tokens_per_rank: Sequence[int],
        schedule: int,
        x: int,
        topk_weights: int,
        weights: WeightAddresses,
        saved: SavedAddresses,
    ) -> None: ...

class VirtualWorkspace:
    def __init__(
        self,
        *,
        ranks: int,
        hidden: int,
        intermediate: int,
        num_experts: int,
        topk: int,
        max_tokens: int,
        shared_intermediate: int,
        activation: str,
        ring_rows: int = -1,
        saved_rows: int = -1,
        chunk_rows: int = -1,
        blocks: int = -1,
        keep_x: bool = False,
        timeout_s: float = 60.0,
        poison: bool = False,
        jitter_seed: int = 0,
    ) -> None: ...
    def build_schedule(
        self, topk_idx: int, is_int64: bool, tokens_per_rank: Sequence[int], schedule: int, expert_counts: int
    ) -> int: ...
    def forward(self, inputs: PassAddresses, save: bool, out: int) -> None: ...
    def backward(self, inputs: PassAddresses, dout: int, gradients: GradientAddresses, mode: GradientMode) -> None: ...
    def check(self) -> None: ...
    @property
    def ring_rows(self) -> int: ...
    @property
    def saved_rows(self) -> int: ...
    @property
    def schedule_words(self) -> int: ...
