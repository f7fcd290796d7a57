"""Activation checkpointing that keeps the routes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..ops import ROUTE_OPERATORS


def keep_routes() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=keep_routes)`.

    The experts that forward chose, and its schedule, are saved and drive the recomputation, whatever the router would
    choose the second time; all else is computed again. Without it routes are chosen again, which gives the same ones as long
    as the router computes the same bits from the same input.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in ROUTE_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
