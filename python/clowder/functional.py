"""The layer as functions: two passes without state, and one differentiable call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops
from .errors import ClowderError, argument_error
from .ops import Saved
from .weights import NAMES, Weight, check_memory, flatten, unflatten
from .workspace import Schedule, Workspace


class Gradients(NamedTuple):
    """Gradients of the layer's inputs, None where not needed, in the shapes and forms of the inputs.

    Those of x are bf16, those of topk_weights of topk_weights' dtype, those of weights bf16 unless asked otherwise.
    """

    x: Tensor | None = None
    topk_weights: Tensor | None = None
    w13: Weight | None = None
    w2: Weight | None = None
    shared_w13: Weight | None = None
    shared_w2: Weight | None = None


def forward(
    workspace: Workspace,
    schedule: Schedule,
    x: Tensor,
    topk_weights: Tensor,
    w13: Weight,
    w2: Weight,
    shared_w13: Weight | None = None,
    shared_w2: Weight | None = None,
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
        w13: [E, 2I, H] bf16, or another of the forms that `moe` lists.
        w2: [E, H, I] bf16, likewise.
        shared_w13: [2Is, H] bf16, with a shared expert, likewise.
        shared_w2: [H, Is] bf16, with a shared expert.
        save: whether backward will run.

    Returns:
        out [tokens, H] bf16, fresh; and what backward needs, None if `save` is not set. `out` is differentiable where
        autograd is on and `save` is set.

    Raises:
        ClowderError: "argument" or "timeout".
    """
    flat = _flatten(w13, w2, shared_w13, shared_w2)
    out, *saved = _run_forward(workspace, schedule, x, topk_weights, flat, (save, save), _NO_MAINS)
    return out, Saved(*saved) if save else None


def backward(
    workspace: Workspace,
    schedule: Schedule,
    saved: Saved,
    dout: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    w13: Weight,
    w2: Weight,
    shared_w13: Weight | None = None,
    shared_w2: Weight | None = None,
    *,
    main_grads: Mapping[str, Weight | None] | Gradients | None = None,
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
        main_grads: bf16 or fp32 tensors in the shapes and forms of the weights, by the weight's name, that gradients are
            added to (one fp32 addition, one rounding). Those gradients come back as None.
        needs: which gradients to compute: the names, or a bool for each by name or in order; None is all.
        weight_dtype: of the weights' gradients that are returned, torch.bfloat16 or torch.float32.

    Returns:
        The gradients. With several ranks, a shared expert's are summed over ranks in fp32, in rank order, and rounded
        once.

    Raises:
        ClowderError: "argument" or "timeout".
    """
    given = (w13, w2, shared_w13, shared_w2)
    flat = _flatten(*given)
    tokens = _tokens(workspace, schedule, x)
    _check_tensors(dout=dout, topk_weights=topk_weights)
    if not isinstance(saved, Saved):
        raise argument_error("saved", f"a {type(saved).__name__}", "what clowder.forward returned with save=True")
    _check_tensors(**{f"saved.{name}": tensor for name, tensor in saved._asdict().items()})
    if weight_dtype not in (torch.bfloat16, torch.float32):
        raise argument_error("weight_dtype", repr(weight_dtype), "torch.bfloat16 or torch.float32")
    wanted = _needs(needs)
    wanted = [*wanted[:2], *(want and len(weight) > 0 for want, weight in zip(wanted[2:], flat))]
    mains = [main if want else [] for main, want in zip(_mains(main_grads), wanted[2:])]
    layer = ops.Layer(x, topk_weights, *flat, schedule.table, workspace.operand(), tokens)
    arguments = (*layer, *saved, dout, wanted)
    with torch.no_grad():  # these are gradients; they have none of their own
        if any(mains):
            results = ops.accumulate(layer, arguments, mains, weight_dtype)
        else:
            results = torch.ops.clowder.backward(*arguments, weight_dtype)
    of_weights = [
        unflatten(weight, result) if want and not main else None
        for weight, result, want, main in zip(given, results[2:], wanted[2:], mains)
    ]
    return Gradients(*(result if want else None for result, want in zip(results[:2], wanted)), *of_weights)


def moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w13: Weight,
    w2: Weight,
    shared_w13: Weight | None = None,
    shared_w2: Weight | None = None,
    *,
    workspace: Workspace,
    tokens_per_rank: Sequence[int] | None = None,
    main_grads: Mapping[str, Weight | None] | None = None,
) -> Tensor:
    """The whole layer, differentiable once in x, topk_weights and the weights; see `forward`.

    Only the gradients that are asked for are computed, and nothing is saved where none can be. Under
    torch.autocast with bf16, x and the weights may be of another floating type.

    Args:
        x: [tokens, H].
        topk_idx: [tokens, K] int32 or int64; -1 is no route, other ids outside [0, E) are counted and skipped.
        topk_weights: [tokens, K] fp32 or bf16.
        w13: [E, 2I, H]; or a pair (w1, w3) of [E, I, H]; or a list of each expert's [2I, H]; or a pair of lists of each
            expert's w1 and w3 [I, H]. Gradients arrive at these tensors.
        w2: [E, H, I]; or a list of each expert's [H, I].
        shared_w13: [2Is, H], or a pair of [Is, H], with a shared expert.
        shared_w2: [H, Is], with a shared expert.
        workspace: where it runs.
        tokens_per_rank: tokens of each rank; None is an even split.
        main_grads: bf16 or fp32 tensors in the shapes and forms of the weights, by the weight's name, that backward adds
            gradients to instead of returning them. A weight with an attribute `grad_added_to_main_grad` gets it set to
            True, and zeros for a gradient, as Megatron-LM wants it. Not under torch.compile.

    Returns:
        [tokens, H] bf16.

    Raises:
        ClowderError: "argument" or "timeout"; "unsupported" for `main_grads` under torch.compile, and from backward for
            a second derivative.
    """
    _check_workspace(workspace)
    _check_tensors(x=x, topk_weights=topk_weights)
    schedule = workspace.build_schedule(topk_idx, tokens_per_rank=tokens_per_rank)
    return routed(workspace, schedule, x, topk_weights, w13, w2, shared_w13, shared_w2, main_grads=main_grads)


def routed(
    workspace: Workspace,
    schedule: Schedule,
    x: Tensor,
    topk_weights: Tensor,
    w13: Weight,
    w2: Weight,
    shared_w13: Weight | None = None,
    shared_w2: Weight | None = None,
    *,
    main_grads: Mapping[str, Weight | None] | None = None,
) -> Tensor:
    """`moe` with a schedule that is built already."""
    _check_tensors(x=x, topk_weights=topk_weights)
    mains = _mains(main_grads)
    x, flat = _autocast(x, _flatten(w13, w2, shared_w13, shared_w2))
    if any(mains):
        if torch.compiler.is_compiling():
            raise ClowderError("unsupported", "main_grads: not under torch.compile, where gradients go to .grad")
        workspace.check_main_grads(flat, mains)
    out, *_ = _run_forward(workspace, schedule, x, topk_weights, flat, _saves(x, topk_weights, flat), mains)
    return out


_NO_MAINS: Sequence[list[Tensor]] = ([], [], [], [])


def _run_forward(
    workspace: Workspace,
    schedule: Schedule,
    x: Tensor,
    topk_weights: Tensor,
    flat_weights: ops.FlatWeights,
    saves: tuple[bool, bool],
    mains: Sequence[list[Tensor]],
) -> tuple[Tensor, ...]:
    tokens = _tokens(workspace, schedule, x)
    _check_tensors(topk_weights=topk_weights)
    refuse_transforms(x, topk_weights, *(tensor for weight in flat_weights for tensor in weight))
    layer = ops.Layer(x, topk_weights, *flat_weights, schedule.table, workspace.operand(), tokens)
    return torch.ops.clowder.forward(*layer, workspace.saved_rows, workspace.keep_x, *saves, *mains)


def refuse_transforms(*tensors: Tensor) -> None:
    """PyTorch would give a tangent of zero where an operator has no forward-mode derivative.

    Raises:
        ClowderError: "unsupported" for tensors of torch.func or of forward-mode differentiation.
    """
    if torch.compiler.is_compiling():
        return
    has_level = forward_ad._current_level >= 0
    if has_level and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        message = "forward-mode differentiation: clowder has reverse-mode derivatives only; use torch.autograd"
        raise ClowderError("unsupported", message)
    if torch._C._functorch.peek_interpreter_stack() is None:
        return
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        raise ClowderError("unsupported", "torch.func: clowder does not work under its transforms; use torch.autograd")


def _saves(x: Tensor, topk_weights: Tensor, flat_weights: ops.FlatWeights) -> tuple[bool, bool]:
    """Whether backward will want the routed rows' values, and whether it will run at all: where it does, the engine wants a
    shared expert's values."""
    if not torch.is_grad_enabled():
        return False, False
    w13, w2, shared_w13, shared_w2 = flat_weights
    rows = any(tensor.requires_grad for tensor in (x, topk_weights, *w13, *w2))
    return rows, rows or any(tensor.requires_grad for tensor in (*shared_w13, *shared_w2))


def _autocast(x: Tensor, flat_weights: ops.FlatWeights) -> tuple[Tensor, ops.FlatWeights]:
    """Casts as autocast asks for; its derivative casts gradients back."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, flat_weights
    dtype = torch.get_autocast_dtype(x.device.type)
    if dtype != torch.bfloat16:
        raise argument_error("autocast", dtype, "torch.bfloat16")
    w13, w2, shared_w13, shared_w2 = ([tensor.to(dtype) for tensor in weight] for weight in flat_weights)
    return x.to(dtype), (w13, w2, shared_w13, shared_w2)


def _check_workspace(workspace: Workspace) -> None:
    if not isinstance(workspace, Workspace):
        raise argument_error("workspace", repr(workspace), "a clowder.Workspace")


def _check_tensors(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise argument_error(name, f"a {type(tensor).__name__}", "a tensor")
        check_memory(name, tensor)


def _flatten(*given: Weight | None) -> ops.FlatWeights:
    w13, w2, shared_w13, shared_w2 = (_flatten_one(name, weight) for name, weight in zip(NAMES, given))
    return w13, w2, shared_w13, shared_w2


def _flatten_one(name: str, weight: Weight | None) -> list[Tensor]:
    tensors = flatten(name, weight)
    for tensor in tensors:
        check_memory(name, tensor)
    return tensors


def _tokens(workspace: Workspace, schedule: Schedule, x: Tensor) -> list[int]:
    _check_workspace(workspace)
    _check_tensors(x=x)
    if x.dim() != 2:
        raise argument_error("x", f"shape {list(x.shape)}", f"[tokens, H = {workspace.hidden}]")
    if not isinstance(schedule, Schedule):
        raise argument_error("schedule", f"a {type(schedule).__name__}", "what Workspace.build_schedule returned")
    check_memory("schedule", schedule.table)
    if schedule.layout != workspace.layout:
        names = "(ranks, num_experts, topk, max_tokens)"
        raise argument_error("schedule", f"of a workspace with {names} = {schedule.layout}", f"of {workspace.layout}")
    tokens = list(schedule.tokens_per_rank)
    # Symbols need no guard: the operator checks again when it runs.
    if not torch.compiler.is_compiling() and sum(tokens) != x.shape[0]:
        raise argument_error("x", f"{x.shape[0]} tokens", f"the schedule's {sum(tokens)}")
    return tokens


def _needs(needs: Mapping[str, bool] | Sequence[bool] | Iterable[str] | None) -> list[bool]:
    names = Gradients._fields
    if needs is None:
        return [True] * len(names)
    if not hasattr(needs, "__iter__") or isinstance(needs, str):
        raise argument_error("needs", repr(needs), f"names of {names}, or a bool for each")
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


def _mains(main_grads: Mapping[str, Weight | None] | Gradients | None) -> Sequence[list[Tensor]]:
    if main_grads is None:
        return _NO_MAINS
    if not isinstance(main_grads, (Mapping, Gradients)):
        raise argument_error("main_grads", f"a {type(main_grads).__name__}", f"tensors by names of {NAMES}")
    given = main_grads._asdict() if isinstance(main_grads, Gradients) else dict(main_grads)
    if unknown := {name for name, main in given.items() if main is not None} - set(NAMES):
        raise argument_error("main_grads", sorted(unknown), f"names of {NAMES}")
    return [_flatten_one(f"main_grads[{name!r}]", given.get(name)) for name in NAMES]
