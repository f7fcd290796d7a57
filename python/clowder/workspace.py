"""Workspaces and schedules."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from .checks import check_into, split_evenly
from .engine import Engine, make_handle
from .errors import ClowderError, SkippedIdsWarning, argument_error
from .group import VirtualGroup
from .numbers import flag, integer, non_negative, optional_non_negative, positive_seconds
from .weights import check_memory


class Schedule(NamedTuple):
    """Which rows each expert receives in a step; made by `Workspace.build_schedule`, read by every pass of the step.

    Attributes:
        table: [R, words] int32, the engine's own layout.
        expert_counts: [E] int64, rows of each global expert.
        skipped_ids: 0-d int64, ids of `topk_idx` that were neither -1 nor an expert.
        tokens_per_rank: tokens of each rank.
        layout: (R, E, K, max_tokens) of the workspaces that can read it.
    """

    table: Tensor
    expert_counts: Tensor
    skipped_ids: Tensor
    tokens_per_rank: tuple[int, ...]
    layout: tuple[int, int, int, int]


class Workspace:
    """The memory and threads that a layer's passes run on. Layers of one shape may share a workspace, in any order of
    forward and backward passes: what a pass leaves for another is in its schedule and saved tensors.

    Calls from several threads run one at a time. A deep copy of a module shares its workspaces, a pickled one makes its own,
    and a forked process goes on with its copy. Autograd graphs and compiled functions keep alive what they need.

    Args:
        hidden: H, width of a token, a positive multiple of 32.
        intermediate: I, width of an expert, a positive multiple of 32.
        num_experts: E over all ranks, a multiple of the number of ranks.
        topk: K, slots of a token, 1 to 16.
        max_tokens: the most tokens that one rank may hold in a step.
        shared_intermediate: Is, width of the shared expert, a multiple of 32; 0 is no shared expert.
        activation: "swiglu", "swiglu-clamp:LIMIT": silu(min(g, LIMIT)) * clamp(u, -LIMIT, LIMIT), "geglu" (gelu in its
            tanh form), "reglu", or "gpt-oss": (clamp(u, -7, 7) + 1) * g' * sigmoid(1.702 g') with g' = min(g, 7).
        group: the expert-parallel group, `VirtualGroup(1)` if None.
        ring_rows: rows of one rank that a pass holds at once; None is the larger of three chunks and a quarter of
            ceil(1.25 * max_tokens * K).
        saved_rows: rows of one rank whose gate and up values are saved for backward, 4 * I bytes each; the rest is
            computed again. None is ceil(1.25 * max_tokens * K).
        keep_x: keep the pulled rows of x for backward (2 * H bytes a row) instead of pulling them again.
        timeout_s: limit of every wait between ranks, in seconds.
        device: where tensors live; None and "cpu" are the CPU engine.
        chunk_rows: grain of overlap, in rows; None leaves it to the engine.
        blocks: pairs of a math worker and a copy agent; None is the machine's cores.
        poison: fill every buffer with NaN before each pass (for tests).
        jitter_seed: random delays in copies and tasks (for tests); 0 is none.

    None of ring_rows, saved_rows, keep_x, chunk_rows, blocks, poison and jitter_seed changes a bit of any result.

    Attributes:
        handle: 0-d int64 on the CPU, by which operators know the workspace.
        ranks: R.
        schedule_words: length of one rank's schedule, in int32.
        ring_rows, saved_rows: as resolved; both are cut to what the worst routing fills.

    Raises:
        ClowderError: "argument" that names what cannot be used; "unsupported" for a device without an engine.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        topk: int,
        max_tokens: int,
        *,
        shared_intermediate: int = 0,
        activation: str = "swiglu",
        group: VirtualGroup | None = None,
        ring_rows: int | None = None,
        saved_rows: int | None = None,
        keep_x: bool = False,
        timeout_s: float = 60.0,
        device: torch.device | str | None = None,
        chunk_rows: int | None = None,
        blocks: int | None = None,
        poison: bool = False,
        jitter_seed: int = 0,
        _limit_advice: str = "",
    ) -> None:
        self._arguments: dict[str, Any] = dict(locals())
        del self._arguments["self"]
        self.group = VirtualGroup(1) if group is None else group
        if not isinstance(self.group, VirtualGroup):
            raise argument_error("group", repr(group), "a clowder.VirtualGroup")
        self.device = _with_engine(as_device(device))
        if not isinstance(activation, str):
            raise argument_error("activation", repr(activation), "a string")

        self.ranks: int = self.group.ranks
        self.hidden = integer("hidden", hidden)
        self.intermediate = integer("intermediate", intermediate)
        self.num_experts = integer("num_experts", num_experts)
        self.topk = integer("topk", topk)
        self.max_tokens = integer("max_tokens", max_tokens)
        self.shared_intermediate = integer("shared_intermediate", shared_intermediate)
        self.activation = activation
        self.keep_x = flag("keep_x", keep_x)
        options = {
            "ranks": self.ranks,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "num_experts": self.num_experts,
            "topk": self.topk,
            "max_tokens": self.max_tokens,
            "shared_intermediate": self.shared_intermediate,
            "activation": activation,
            "ring_rows": optional_non_negative("ring_rows", ring_rows),
            "saved_rows": optional_non_negative("saved_rows", saved_rows),
            "chunk_rows": optional_non_negative("chunk_rows", chunk_rows),
            "blocks": optional_non_negative("blocks", blocks),
            "keep_x": self.keep_x,
            "timeout_s": positive_seconds("timeout_s", timeout_s),
            "poison": flag("poison", poison),
            "jitter_seed": non_negative("jitter_seed", jitter_seed),
        }
        self._engine = Engine(self.device, _limit_advice, options)
        self.ring_rows: int = self._engine.ring_rows
        self.saved_rows: int = self._engine.saved_rows
        self.schedule_words: int = self._engine.schedule_words
        self.handle = make_handle(self._engine)

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """(R, E, K, max_tokens): schedules serve every workspace in which these are equal."""
        return (self.ranks, self.num_experts, self.topk, self.max_tokens)

    def build_schedule(self, topk_idx: Tensor, *, tokens_per_rank: Sequence[int] | None = None) -> Schedule:
        """Builds the schedule of a step from every token's choices.

        Args:
            topk_idx: [tokens, K] int32 or int64, the ranks' tokens one after the other. -1 is no route; other ids outside
                [0, E) are counted and skipped. One expert may be chosen several times: each slot is a row.
            tokens_per_rank: tokens of each rank, each from 0 to max_tokens. None splits them as evenly as can be, the
                first ranks holding one more.

        Returns:
            The schedule. It serves any number of passes, in any order, also beside other schedules.

        Raises:
            ClowderError: "argument" or "timeout".
        """
        if not isinstance(topk_idx, Tensor) or topk_idx.dim() == 0:
            was = "0-d" if isinstance(topk_idx, Tensor) else f"a {type(topk_idx).__name__}"
            raise argument_error("topk_idx", was, f"a tensor [tokens, K = {self.topk}]")
        check_memory("topk_idx", topk_idx)
        tokens = self.split(topk_idx.shape[0], tokens_per_rank)
        table, expert_counts, skipped_ids = torch.ops.clowder.build_schedule(
            topk_idx, self.operand(), tokens, self.ranks, self.num_experts, self.schedule_words
        )
        return Schedule(table, expert_counts, skipped_ids, tuple(tokens), self.layout)

    def check(self) -> None:
        """Reports what went wrong on this workspace and was not raised yet.

        Warns with `SkippedIdsWarning` if schedules built since the last check skipped ids.

        Raises:
            ClowderError: "timeout" if the workspace is dead because a wait ran out of time.
        """
        self._engine.core.check()
        if skipped := self._engine.take_skipped():
            text = f"topk_idx: {skipped} ids were neither -1 nor in [0, {self.num_experts}) and were skipped"
            warnings.warn(text, SkippedIdsWarning, stacklevel=2)

    def split(self, tokens: int, tokens_per_rank: Sequence[int] | None) -> list[int]:
        """Tokens of each rank; None is as even as can be. Sums and limits are the operators' to check.

        Raises:
            ClowderError: "argument" if these are no counts.
        """
        if tokens_per_rank is None:
            return split_evenly(tokens, self.ranks)
        if torch.compiler.is_compiling():  # counts may be symbols
            return list(tokens_per_rank)
        if not isinstance(tokens_per_rank, Sequence):
            raise argument_error("tokens_per_rank", repr(tokens_per_rank), "a sequence of counts, or None")
        return [integer("tokens_per_rank", count) for count in tokens_per_rank]

    def check_main_grads(self, flat_weights: Sequence[list[Tensor]], mains: Sequence[list[Tensor]]) -> None:
        """Main gradients, none for some weights, suit the weights.

        Raises:
            ClowderError: "argument".
        """
        check_into(self._engine, flat_weights, mains)

    def operand(self) -> Tensor:
        """The handle as operators take it: under fake tensors a fake one, which is never read."""
        if torch.compiler.is_compiling():
            return self.handle
        fake_mode = active_fake_mode()
        return self.handle if fake_mode is None else fake_mode.from_tensor(self.handle)

    def __repr__(self) -> str:
        return (
            f"Workspace(hidden={self.hidden}, intermediate={self.intermediate}, num_experts={self.num_experts}, "
            f"topk={self.topk}, max_tokens={self.max_tokens}, shared_intermediate={self.shared_intermediate}, "
            f"activation={self.activation!r}, group={self.group})"
        )

    # No result depends on what a workspace holds between passes: a copied module shares it, an unpickled one gets its own.
    def __deepcopy__(self, memo: dict[int, object]) -> Workspace:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return (_make_workspace, (self._arguments,))


def _make_workspace(arguments: dict[str, object]) -> Workspace:
    return Workspace(**arguments)  # type: ignore[arg-type]


def as_device(device: torch.device | str | None) -> torch.device:
    """The device, None being the CPU.

    Raises:
        ClowderError: "argument" if it is none.
    """
    try:
        return torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        raise argument_error("device", repr(device), 'None or "cpu"') from None


def _with_engine(device: torch.device) -> torch.device:
    if device.type != "cpu":
        raise ClowderError("unsupported", f"device: {device}; this build has the CPU engine only")
    return device
