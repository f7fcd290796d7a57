"""Workspaces and schedules.

Operators of torch.library take tensors and plain numbers only, so a workspace enters them as its `handle`, an integer
that this module's registry resolves. The registry holds workspaces weakly: a workspace lives as long as its owner, or an
autograd graph that will need it, does. Handles mean nothing in another process.
"""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _core
from .errors import ClowderError, SkippedIdsWarning, argument_error
from .group import VirtualGroup

_workspaces: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()
_next_handle = itertools.count(1)


def workspace_of(handle: int) -> Workspace:
    """The workspace with this handle.

    Raises:
        ClowderError: "argument" if it no longer exists.
    """
    workspace = _workspaces.get(int(handle))
    if workspace is None:
        raise argument_error("workspace", f"handle {handle}", "that of a workspace that is still alive in this process")
    return workspace


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

    Calls from several threads run one at a time.

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
    ) -> None:
        self._arguments = dict(locals())
        del self._arguments["self"]
        self.group = VirtualGroup(1) if group is None else group
        if not isinstance(self.group, VirtualGroup):
            raise argument_error("group", repr(group), "a clowder.VirtualGroup")
        self.device = torch.device("cpu" if device is None else device)
        if self.device.type != "cpu":
            raise ClowderError("unsupported", f"device: {self.device}; this build has the CPU engine only")
        if not isinstance(activation, str):
            raise argument_error("activation", repr(activation), "a string")

        if not 0.0 < float(timeout_s) < float("inf"):
            raise argument_error("timeout_s", timeout_s, "above 0 and finite")

        self.ranks = self.group.ranks
        self.hidden = _count("hidden", hidden)
        self.intermediate = _count("intermediate", intermediate)
        self.num_experts = _count("num_experts", num_experts)
        self.topk = _count("topk", topk)
        self.max_tokens = _count("max_tokens", max_tokens)
        self.shared_intermediate = _count("shared_intermediate", shared_intermediate)
        self.activation = activation
        self.keep_x = bool(keep_x)
        self.core = _core.VirtualWorkspace(
            ranks=self.ranks,
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            topk=self.topk,
            max_tokens=self.max_tokens,
            shared_intermediate=self.shared_intermediate,
            activation=activation,
            ring_rows=_optional_count("ring_rows", ring_rows),
            saved_rows=_optional_count("saved_rows", saved_rows),
            chunk_rows=_optional_count("chunk_rows", chunk_rows),
            blocks=_optional_count("blocks", blocks),
            keep_x=self.keep_x,
            timeout_s=float(timeout_s),
            poison=bool(poison),
            jitter_seed=_count("jitter_seed", jitter_seed),
        )
        self.ring_rows: int = self.core.ring_rows
        self.saved_rows: int = self.core.saved_rows
        self.schedule_words: int = self.core.schedule_words
        self.skipped_ids = 0  # since the last check()
        self.handle = next(_next_handle)
        _workspaces[self.handle] = self

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
            raise argument_error("topk_idx", repr(topk_idx), f"a tensor [tokens, K = {self.topk}]")
        tokens = self.split(topk_idx.shape[0], tokens_per_rank)
        table, expert_counts, skipped_ids = torch.ops.clowder.build_schedule(topk_idx, self.handle, tokens)
        return Schedule(table, expert_counts, skipped_ids, tokens, self.layout)

    def check(self) -> None:
        """Reports what went wrong on this workspace and was not raised yet.

        Warns with `SkippedIdsWarning` if schedules built since the last check skipped ids.

        Raises:
            ClowderError: "timeout" if the workspace is dead because a wait ran out of time.
        """
        self.core.check()
        skipped, self.skipped_ids = self.skipped_ids, 0
        if skipped:
            text = f"topk_idx: {skipped} ids were neither -1 nor in [0, {self.num_experts}) and were skipped"
            warnings.warn(text, SkippedIdsWarning, stacklevel=2)

    def split(self, tokens: int, tokens_per_rank: Sequence[int] | None) -> tuple[int, ...]:
        """Tokens of each rank, checked; None is as even as can be.

        Raises:
            ClowderError: "argument".
        """
        if tokens_per_rank is None:
            per_rank = tuple(tokens // self.ranks + (r < tokens % self.ranks) for r in range(self.ranks))
        else:
            per_rank = tuple(_count("tokens_per_rank", n) for n in tokens_per_rank)
            if len(per_rank) != self.ranks or min(per_rank) < 0 or sum(per_rank) != tokens:
                may_be = f"{self.ranks} counts, none below 0, that add up to the {tokens} tokens"
                raise argument_error("tokens_per_rank", list(per_rank), may_be)
        if max(per_rank) > self.max_tokens:
            may_be = f"at most max_tokens = {self.max_tokens} on each rank of the workspace"
            raise argument_error("tokens", f"{max(per_rank)} on one rank", may_be)
        return per_rank

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


def _count(name: str, value: object) -> int:
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise argument_error(name, repr(value), "an integer") from None
    if not -(2**31) <= count < 2**31:
        raise argument_error(name, count, "within 32 bits")
    return count


def _optional_count(name: str, value: int | None) -> int:
    if value is None:
        return -1  # WorkspaceOptions::kDefault
    count = _count(name, value)
    if count < 0:
        raise argument_error(name, count, "None or at least 0")
    return count
