"""Checks of an operator's tensors against the workspace that they came to. They read metadata only, and run before the
engine does; fake tensors pass unchecked, so a compiled call is refused when it runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import weights
from .engine import Engine
from .errors import argument_error


def check_sizes(engine: Engine, **given: int) -> None:
    """An operator's sizes, which its results' shapes are made from, are the workspace's."""
    for name, value in given.items():
        if value != getattr(engine, name):
            raise argument_error(name, value, f"the workspace's {getattr(engine, name)}")


def split_tokens(engine: Engine, tokens: int, tokens_per_rank: Sequence[int] | None) -> list[int]:
    """Tokens of each rank, checked; None is as even as can be."""
    per_rank = split_evenly(tokens, engine.ranks) if tokens_per_rank is None else list(tokens_per_rank)
    if len(per_rank) != engine.ranks or min(per_rank) < 0 or sum(per_rank) != tokens:
        may_be = f"{engine.ranks} counts, none below 0, that add up to the {tokens} tokens"
        raise argument_error("tokens_per_rank", per_rank, may_be)
    if max(per_rank) > engine.max_tokens:
        may_be = f"at most max_tokens = {engine.max_tokens} on each rank of the workspace{engine.limit_advice}"
        raise argument_error("tokens", f"{max(per_rank)} on one rank", may_be)
    return per_rank


def split_evenly(tokens: int, ranks: int) -> list[int]:
    """As evenly as can be, the first ranks holding one more. Without a branch, so that tokens may be symbolic."""
    return [(tokens + ranks - 1 - rank) // ranks for rank in range(ranks)]


def check_topk_idx(engine: Engine, topk_idx: Tensor) -> None:
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise argument_error("topk_idx", topk_idx.dtype, "torch.int32 or torch.int64")
    if topk_idx.dim() != 2 or topk_idx.shape[1] != engine.topk:
        raise argument_error("topk_idx", f"shape {list(topk_idx.shape)}", f"[tokens, K = {engine.topk}]")
    _check_device(engine, "topk_idx", topk_idx)


def check_layer(
    engine: Engine, x: Tensor, topk_weights: Tensor, flat_weights: Sequence[Sequence[Tensor]], schedule: Tensor
) -> None:
    if x.dim() != 2 or x.shape[1] != engine.hidden:
        raise argument_error("x", f"shape {list(x.shape)}", f"[tokens, H = {engine.hidden}]")
    _check_bf16(engine, "x", x)
    if topk_weights.dtype not in (torch.float32, torch.bfloat16):
        raise argument_error("topk_weights", topk_weights.dtype, "torch.float32 or torch.bfloat16")
    _check_shape(engine, "topk_weights", topk_weights, (x.shape[0], engine.topk))
    if schedule.dtype != torch.int32:
        raise argument_error("schedule", schedule.dtype, "the int32 table of a schedule")
    _check_shape(engine, "schedule", schedule, (engine.ranks, engine.schedule_words))

    def check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        _check_bf16(engine, name, tensor)
        _check_shape(engine, name, tensor, shape)

    hidden, intermediate, shared = engine.hidden, engine.intermediate, engine.shared_intermediate
    shapes = ((2 * intermediate, hidden), (hidden, intermediate), (2 * shared, hidden), (hidden, shared))
    for name, tensors, shape in zip(weights.NAMES, flat_weights, shapes):
        is_shared = name.startswith("shared")
        if is_shared and bool(tensors) != (shared > 0):
            was, may_be = ("given", "None") if tensors else ("None", "given")
            raise argument_error(name, was, f"{may_be} for a workspace with shared_intermediate={shared}")
        if not is_shared and not tensors:
            raise argument_error(name, "None", "given")
        if tensors:
            weights.check_form(name, tensors, 1 if is_shared else engine.num_experts, shape, check)


def check_saved(
    engine: Engine, names: Sequence[str], saved: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Each is of its shape, or empty where it was not saved."""
    for name, tensor, shape in zip(names, saved, shapes):
        is_right = tuple(tensor.shape) in (shape, (0,))
        if tensor.dtype != torch.bfloat16 or not is_right or not tensor.is_contiguous():
            was = f"{tensor.dtype}, shape {list(tensor.shape)}"
            raise argument_error(f"saved.{name}", was, f"as forward left it: torch.bfloat16, shape {list(shape)}")
        _check_device(engine, f"saved.{name}", tensor)


def check_dout(engine: Engine, dout: Tensor, x: Tensor) -> None:
    _check_bf16(engine, "dout", dout)
    _check_shape(engine, "dout", dout, tuple(x.shape))


def check_into(engine: Engine, flat_weights: Sequence[Sequence[Tensor]], into: Sequence[Sequence[Tensor]]) -> None:
    """Tensors that gradients are written to, or added to: those of a weight, or none."""
    for weight_name, tensors, main in zip(weights.NAMES, flat_weights, into):
        if not main:
            continue
        name = f"main_grads[{weight_name!r}]"
        if len(main) != len(tensors):
            raise argument_error(name, f"{len(main)} tensors", f"{len(tensors)}, one for each of the weight")
        for tensor, weight in zip(main, tensors):
            if tensor.dtype not in (torch.bfloat16, torch.float32) or tensor.dtype != main[0].dtype:
                raise argument_error(name, tensor.dtype, "torch.float32 or torch.bfloat16, the same for each tensor")
            _check_shape(engine, name, tensor, tuple(weight.shape))
            if not tensor.is_contiguous():
                raise argument_error(name, f"strides {tensor.stride()}", "contiguous, as it is written in place")


def _check_bf16(engine: Engine, name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.bfloat16:
        may_be = "torch.bfloat16"
        if name != "dout":
            may_be += f', or clowder.moe or clowder.nn.MoE under torch.autocast("{engine.device.type}", torch.bfloat16)'
        raise argument_error(name, tensor.dtype, may_be)
    _check_device(engine, name, tensor)


def _check_shape(engine: Engine, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise argument_error(name, f"shape {list(tensor.shape)}", f"{list(shape)} for {engine}")
    _check_device(engine, name, tensor)


def _check_device(engine: Engine, name: str, tensor: Tensor) -> None:
    if tensor.device.type != engine.device.type:
        raise argument_error(name, f"on {tensor.device}", f"on the workspace's device {engine.device}")
