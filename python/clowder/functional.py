"""The layer as functions: two passes without state, and one differentiable call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import argument_error
from .ops import Saved
from .workspace import Schedule, Workspace

_WEIGHTS = ("w13", "w2", "shared_w13", "shared_w2")


class Gradients(NamedTuple):
    """Gradients of the layer's inputs, None where not needed, in the shapes of the inputs.

    Those of x are bf16, those of topk_weights of topk_weights' dtype, those of weights bf16 unless asked otherwise.
    """

    x: Tensor | None = None
    topk_weights: Tensor | None = None
    w13: Tensor | None = None
    w2: Tensor | None = None
    shared_w13: Tensor | None = None
    shared_w2: Tensor | None = None


def forward(
    workspace: Workspace,
    schedule: Schedule,
    x: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    *,
    save: bool = True,
) -> tuple[Tensor, Saved | None]:
    """out = shared(x) + the sum over slots of topk_weight * expert(x).

    An expert is w2 @ f(w1 @ x, w3 @ x); its first I rows of w13 are w1 (gate), the others w3 (up).

    Args:
        workspace: where it runs.
        schedule: of the tokens' choices, from this workspace or one of equal layout.
        x: [tokens, H] bf16, the ranks' tokens one after the other. It may be overwritten after its backward.
        topk_weights: [tokens, K] fp32 or bf16.
        w13: [E, 2I, H] bf16.
        w2: [E, H, I] bf16.
        shared_w13: [2Is, H] bf16, with a shared expert.
        shared_w2: [H, Is] bf16, with a shared expert.
        save: whether backward will run.

    Returns:
        out [tokens, H] bf16, fresh; and what backward needs, None if `save` is not set. `out` is differentiable where
        autograd is on and `save` is set.

    Raises:
        ClowderError: "argument" or "timeout".
    """
    tokens = _tokens(workspace, schedule, x)
    _check_tensors(topk_weights=topk_weights, w13=w13, w2=w2)
    out, *saved = torch.ops.clowder.forward(
        x, topk_weights, w13, w2, shared_w13, shared_w2, schedule.table, workspace.handle, tokens, save
    )
    return out, Saved(*saved) if save else None


def backward(
    workspace: Workspace,
    schedule: Schedule,
    saved: Saved,
    dout: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    *,
    main_grads: Mapping[str, Tensor | None] | Gradients | None = None,
    needs: Mapping[str, bool] | Sequence[bool] | Iterable[str] | None = None,
    weight_dtype: torch.dtype = torch.bfloat16,
) -> Gradients:
    """Gradients of `forward`, given the gradient of its result.

    Args:
        workspace: where it runs; forward may have run on another of equal shape and saved rows.
        schedule: forward's.
        saved: from forward.
        dout: [tokens, H] bf16.
        x, topk_weights, w13, w2, shared_w13, shared_w2: forward's.
        main_grads: bf16 or fp32 tensors in the shapes of the weights, by the weight's name, that gradients are added to
            (one fp32 addition, one rounding). Those gradients come back as None.
        needs: which gradients to compute: the names, or a bool for each by name or in order; None is all.
        weight_dtype: of the weights' gradients that are returned, torch.bfloat16 or torch.float32.

    Returns:
        The gradients. With several ranks, a shared expert's are summed over ranks in fp32, in rank order, and rounded
        once.

    Raises:
        ClowderError: "argument" or "timeout".
    """
    tokens = _tokens(workspace, schedule, x)
    _check_tensors(dout=dout, topk_weights=topk_weights, w13=w13, w2=w2)
    if not isinstance(saved, Saved):
        raise argument_error("saved", repr(saved), "what clowder.forward returned with save=True")
    weights = (w13, w2, shared_w13, shared_w2)
    wanted = _needs(needs)
    wanted = [*wanted[:2], *(want and weight is not None for want, weight in zip(wanted[2:], weights))]
    mains = _main_grads(main_grads)
    mains = [main if want else None for main, want in zip(mains, wanted[2:])]
    layer = (x, topk_weights, *weights, schedule.table, workspace.handle, tokens)
    arguments = (*layer, *saved, dout, wanted, weight_dtype)
    with torch.no_grad():  # these are gradients; they have none of their own
        if all(main is None for main in mains):
            results = torch.ops.clowder.backward(*arguments)
        else:
            results = torch.ops.clowder.backward_accumulate(*arguments, *mains)
    returned = [*wanted[:2], *(want and main is None for want, main in zip(wanted[2:], mains))]
    return Gradients(*(result if is_returned else None for result, is_returned in zip(results, returned)))


def moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    *,
    workspace: Workspace,
    tokens_per_rank: Sequence[int] | None = None,
) -> Tensor:
    """The whole layer, differentiable once in x, topk_weights and the weights; see `forward`.

    Only the gradients that are asked for are computed, and nothing is saved where none can be. Under
    torch.autocast with bf16, x and the weights may be of another floating type.

    Args:
        x: [tokens, H].
        topk_idx: [tokens, K] int32 or int64; -1 is no route, other ids outside [0, E) are counted and skipped.
        topk_weights: [tokens, K] fp32 or bf16.
        w13: [E, 2I, H].
        w2: [E, H, I].
        shared_w13: [2Is, H], with a shared expert.
        shared_w2: [H, Is], with a shared expert.
        workspace: where it runs.
        tokens_per_rank: tokens of each rank; None is an even split.

    Returns:
        [tokens, H] bf16.

    Raises:
        ClowderError: "argument" or "timeout"; from backward also "unsupported", for a second derivative.
    """
    _check_workspace(workspace)
    schedule = workspace.build_schedule(topk_idx, tokens_per_rank=tokens_per_rank)
    return routed(workspace, schedule, x, topk_weights, w13, w2, shared_w13, shared_w2)


def routed(
    workspace: Workspace,
    schedule: Schedule,
    x: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
) -> Tensor:
    """`moe` with a schedule that is built already."""
    _check_tensors(x=x, topk_weights=topk_weights, w13=w13, w2=w2)
    x, w13, w2, shared_w13, shared_w2 = _autocast(x, w13, w2, shared_w13, shared_w2)
    inputs = (x, topk_weights, w13, w2, shared_w13, shared_w2)
    save = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    out, _ = forward(workspace, schedule, *inputs, save=save)
    return out


def _autocast(x: Tensor, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts as autocast asks for; its derivative casts gradients back."""
    if not torch.is_autocast_enabled(x.device.type):
        return (x, *weights)
    dtype = torch.get_autocast_dtype(x.device.type)
    if dtype != torch.bfloat16:
        raise argument_error("autocast", dtype, "torch.bfloat16")
    return tuple(tensor if tensor is None else tensor.to(dtype) for tensor in (x, *weights))


def _check_workspace(workspace: Workspace) -> None:
    if not isinstance(workspace, Workspace):
        raise argument_error("workspace", repr(workspace), "a clowder.Workspace")


def _check_tensors(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise argument_error(name, repr(tensor), "a tensor")


def _tokens(workspace: Workspace, schedule: Schedule, x: Tensor) -> list[int]:
    _check_workspace(workspace)
    _check_tensors(x=x)
    if x.dim() != 2:
        raise argument_error("x", f"shape {list(x.shape)}", f"[tokens, H = {workspace.hidden}]")
    if not isinstance(schedule, Schedule):
        raise argument_error("schedule", repr(schedule), "what Workspace.build_schedule returned")
    if schedule.layout != workspace.layout:
        names = "(ranks, num_experts, topk, max_tokens)"
        raise argument_error("schedule", f"of a workspace with {names} = {schedule.layout}", f"of {workspace.layout}")
    if sum(schedule.tokens_per_rank) != x.shape[0]:
        raise argument_error("x", f"{x.shape[0]} tokens", f"the schedule's {sum(schedule.tokens_per_rank)}")
    return list(schedule.tokens_per_rank)


def _needs(needs: Mapping[str, bool] | Sequence[bool] | Iterable[str] | None) -> list[bool]:
    names = Gradients._fields
    if needs is None:
        return [True] * len(names)
    if isinstance(needs, Mapping):
        given = dict(needs)
    else:
        values = list(needs)
        if all(isinstance(value, str) for value in values):
            given = dict.fromkeys(values, True)
        elif len(values) == len(names):
            return [bool(value) for value in values]
        else:
            raise argument_error("needs", values, f"names of {names}, or a bool for each")
    if unknown := set(given) - set(names):
        raise argument_error("needs", sorted(unknown), f"names of {names}")
    return [bool(given.get(name, False)) for name in names]


def _main_grads(main_grads: Mapping[str, Tensor | None] | Gradients | None) -> list[Tensor | None]:
    if main_grads is None:
        return [None] * len(_WEIGHTS)
    given = main_grads._asdict() if isinstance(main_grads, Gradients) else dict(main_grads)
    if unknown := {name for name, main in given.items() if main is not None} - set(_WEIGHTS):
        raise argument_error("main_grads", sorted(unknown), f"names of {_WEIGHTS}")
    return [given.get(name) for name in _WEIGHTS]
