"""The operators torch.ops.clowder.*: functional, with fake implementations and autograd.

    build_schedule(topk_idx, workspace, tokens_per_rank) -> (table, expert_counts, skipped_ids)
    forward(*layer, save) -> (out, gate_up, saved_x, shared_gate_up)
    backward(*layer, *saved, dout, needs, weight_dtype) -> gradients of (x, topk_weights, w13, w2, shared_w13, shared_w2)
    backward_accumulate(..., main_w13, main_w2, main_shared_w13, main_shared_w2): the same, adding to these in place

`layer` are the fields of `Layer`. `workspace` is a handle (see `workspace.py`), `tokens_per_rank` None an even split. A
tensor that an operator has no use for (a gradient nobody needs, nothing saved) is empty, of shape [0]. Outputs are fresh
and contiguous. The functions of `functional.py` are what users call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._core import GradientAddresses, GradientMode, PassAddresses, SavedAddresses, WeightAddresses
from .errors import ClowderError, argument_error
from .workspace import Workspace, workspace_of

_LAYER = (
    "Tensor x, Tensor topk_weights, Tensor w13, Tensor w2, Tensor? shared_w13, Tensor? shared_w2, "
    "Tensor schedule, int workspace, SymInt[]? tokens_per_rank"
)
_BACKWARD = (
    f"{_LAYER}, Tensor gate_up, Tensor saved_x, Tensor shared_gate_up, "
    "Tensor dout, bool[] needs, ScalarType weight_dtype"
)
_MAINS = "Tensor(a!)? main_w13, Tensor(b!)? main_w2, Tensor(c!)? main_shared_w13, Tensor(d!)? main_shared_w2"
_SIX_TENSORS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


class Layer(NamedTuple):
    """What every pass reads, in the order of the operators' arguments."""

    x: Tensor
    topk_weights: Tensor
    w13: Tensor
    w2: Tensor
    shared_w13: Tensor | None
    shared_w2: Tensor | None
    schedule: Tensor
    workspace: int
    tokens_per_rank: Sequence[int] | None

    @property
    def space(self) -> Workspace:
        return workspace_of(self.workspace)

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return (self.w13, self.w2, self.shared_w13, self.shared_w2)

    def contiguous(self) -> Layer:
        """As the engine reads it, by copies where needed. Addresses are good as long as the result is kept."""
        return Layer(
            self.x.contiguous(),
            self.topk_weights.to(torch.float32).contiguous(),
            *(None if weight is None else weight.contiguous() for weight in self.weights),
            self.schedule.contiguous(),
            self.workspace,
            self.space.split(self.x.shape[0], self.tokens_per_rank),
        )

    def addresses(self, saved: Saved) -> PassAddresses:
        return PassAddresses(
            list(self.tokens_per_rank),
            _address(self.schedule),
            _address(self.x),
            _address(self.topk_weights),
            WeightAddresses(*(_address(weight) for weight in self.weights)),
            SavedAddresses(*(_address(tensor) for tensor in saved)),
        )


class Saved(NamedTuple):
    """What forward leaves for backward, beside the caller's own tensors and the schedule.

    Attributes:
        gate_up: [R, saved_rows, 2I] bf16, gate and up values of each rank's routed rows.
        x: [R, saved_rows, H] bf16 with keep_x, else empty.
        shared_gate_up: [tokens, 2Is] bf16 with a shared expert, else empty.
    """

    gate_up: Tensor
    x: Tensor
    shared_gate_up: Tensor


def _operator(name: str, schema: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    return torch.library.custom_op(f"clowder::{name}", mutates_args=mutates_args, schema=schema)


@_operator("build_schedule", "(Tensor topk_idx, int workspace, SymInt[]? tokens_per_rank) -> (Tensor, Tensor, Tensor)")
def build_schedule(
    topk_idx: Tensor, workspace: int, tokens_per_rank: Sequence[int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    space = workspace_of(workspace)
    _check_topk_idx(space, topk_idx)
    tokens = space.split(topk_idx.shape[0], tokens_per_rank)
    topk_idx = topk_idx.contiguous()
    # Zeros, because the engine leaves the tails of the worst case as they were.
    table = topk_idx.new_zeros((space.ranks, space.schedule_words), dtype=torch.int32)
    expert_counts = topk_idx.new_empty((space.num_experts,), dtype=torch.int64)
    is_int64 = topk_idx.dtype == torch.int64
    skipped = space.core.build_schedule(
        _address(topk_idx), is_int64, list(tokens), _address(table), _address(expert_counts)
    )
    space.skipped_ids += skipped
    return table, expert_counts, topk_idx.new_full((), skipped, dtype=torch.int64)


@build_schedule.register_fake
def _(topk_idx: Tensor, workspace: int, tokens_per_rank: Sequence[int] | None) -> tuple[Tensor, Tensor, Tensor]:
    space = workspace_of(workspace)
    _check_topk_idx(space, topk_idx)
    return (
        topk_idx.new_empty((space.ranks, space.schedule_words), dtype=torch.int32),
        topk_idx.new_empty((space.num_experts,), dtype=torch.int64),
        topk_idx.new_empty((), dtype=torch.int64),
    )


@_operator("forward", f"({_LAYER}, bool save) -> (Tensor, Tensor, Tensor, Tensor)")
def forward(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, save = arguments
    layer = Layer(*inputs)
    _check_layer(layer)
    out = layer.x.new_empty(layer.x.shape)
    saved = _empty_saved(layer, save)
    read = layer.contiguous()
    layer.space.core.forward(read.addresses(saved), save, _address(out))
    return (out, *saved)


@forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, save = arguments
    layer = Layer(*inputs)
    _check_layer(layer)
    return (layer.x.new_empty(layer.x.shape), *_empty_saved(layer, save))


@_operator("backward", f"({_BACKWARD}) -> {_SIX_TENSORS}")
def backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _backward(*arguments, None, None, None, None)


@_operator(
    "backward_accumulate",
    f"({_BACKWARD}, {_MAINS}) -> {_SIX_TENSORS}",
    ("main_w13", "main_w2", "main_shared_w13", "main_shared_w2"),
)
def backward_accumulate(*arguments: Any) -> tuple[Tensor, ...]:
    return _backward(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, gate_up, saved_x, shared_gate_up, dout, needs, weight_dtype = arguments[:-4]
    layer, saved, mains = Layer(*inputs), Saved(gate_up, saved_x, shared_gate_up), arguments[-4:]
    _check_layer(layer)
    _check_saved(layer, saved)
    _check_gradients(layer, dout, weight_dtype, mains)
    space, x, topk_weights = layer.space, layer.x, layer.topk_weights
    wanted = [need and weight is not None for need, weight in zip(needs[2:], layer.weights)]
    dx = x.new_empty(x.shape if needs[0] else (0,))
    dtopk_weights = topk_weights.new_empty(topk_weights.shape if needs[1] else (0,), dtype=torch.float32)

    # A pass has one mode. Where gradients differ in theirs, or a shared expert's come from several ranks, the engine
    # writes fp32; the sum over ranks, the addition and the one rounding are done here.
    modes = {
        (main is not None, weight_dtype if main is None else main.dtype) for main, want in zip(mains, wanted) if want
    }
    is_direct = len(modes) <= 1 and not (space.ranks > 1 and any(wanted[2:]))
    mode = _MODES[modes.pop() if is_direct and modes else (False, torch.float32)]

    buffers: list[Tensor] = []
    for i, (weight, main, want) in enumerate(zip(layer.weights, mains, wanted)):
        if weight is None or not want:
            buffers.append(x.new_empty((0,), dtype=weight_dtype))
        elif is_direct:
            buffers.append(weight.new_empty(weight.shape, dtype=weight_dtype) if main is None else main)
        else:
            shape = (space.ranks, *weight.shape) if i in _SHARED else weight.shape
            buffers.append(weight.new_empty(shape, dtype=torch.float32))

    read, dout = layer.contiguous(), dout.contiguous()
    space.core.backward(
        read.addresses(saved),
        _address(dout),
        GradientAddresses(_address(dx), _address(dtopk_weights), *(_address(buffer) for buffer in buffers)),
        mode,
    )

    results = []
    for i, (main, want, buffer) in enumerate(zip(mains, wanted, buffers)):
        if want and not is_direct:
            buffer = _sum_in_order(buffer) if i in _SHARED else buffer
            if main is not None:
                main.add_(buffer)
            buffer = buffer.to(weight_dtype)
        results.append(buffer if main is None else x.new_empty((0,), dtype=weight_dtype))
    return (dx, dtopk_weights.to(topk_weights.dtype), *results)


_SHARED = (2, 3)  # places of the shared expert's among the weights

_MODES = {
    (False, torch.bfloat16): GradientMode.WRITE_BF16,
    (False, torch.float32): GradientMode.WRITE_FP32,
    (True, torch.bfloat16): GradientMode.ACCUMULATE_BF16,
    (True, torch.float32): GradientMode.ACCUMULATE_FP32,
}


@backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _fake_backward(*arguments, None, None, None, None)


@backward_accumulate.register_fake
def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, gate_up, saved_x, shared_gate_up, dout, needs, weight_dtype = arguments[:-4]
    layer, saved, mains = Layer(*inputs), Saved(gate_up, saved_x, shared_gate_up), arguments[-4:]
    _check_layer(layer)
    _check_saved(layer, saved)
    _check_gradients(layer, dout, weight_dtype, mains)
    nothing = (0,)
    of_weights = [
        dout.new_empty(weight.shape if need and weight is not None and main is None else nothing, dtype=weight_dtype)
        for need, weight, main in zip(needs[2:], layer.weights, mains)
    ]
    return (
        layer.x.new_empty(layer.x.shape if needs[0] else nothing),
        layer.topk_weights.new_empty(layer.topk_weights.shape if needs[1] else nothing),
        *of_weights,
    )


# Autograd: forward's derivative is backward, which has none of its own.


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *layer, workspace, tokens_per_rank, save = inputs
    saved = output[1:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.is_saved = save
    if save:
        ctx.save_for_backward(*layer, *saved)
    ctx.workspace = workspace_of(workspace)  # the graph keeps it alive
    ctx.tokens_per_rank = tokens_per_rank


def _differentiate_forward(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:6])
    not_differentiable = (None,) * (len(ctx.needs_input_grad) - len(needs))
    if dout is None or not any(needs):
        return (None,) * len(needs) + not_differentiable
    if not ctx.is_saved:
        raise argument_error("save", False, "True where a gradient will be asked for")
    *layer, gate_up, saved_x, shared_gate_up = ctx.saved_tensors
    gradients = torch.ops.clowder.backward(
        *layer, ctx.workspace.handle, ctx.tokens_per_rank, gate_up, saved_x, shared_gate_up, dout, needs, torch.bfloat16
    )
    return tuple(gradient if need else None for gradient, need in zip(gradients, needs)) + not_differentiable


def _refuse_double_backward(ctx: Any, *_: Tensor | None) -> None:
    raise ClowderError("unsupported", "double backward: clowder's backward pass is not differentiable")


forward.register_autograd(_differentiate_forward, setup_context=_setup_forward)
backward.register_autograd(_refuse_double_backward)


def _sum_in_order(per_rank: Tensor) -> Tensor:
    total = per_rank[0].clone()
    for of_rank in per_rank[1:]:
        total += of_rank
    return total


def _saved_shapes(layer: Layer, save: bool) -> dict[str, tuple[int, ...]]:
    space, nothing = layer.space, (0,)
    return {
        "gate_up": (space.ranks, space.saved_rows, 2 * space.intermediate) if save else nothing,
        "x": (space.ranks, space.saved_rows, space.hidden) if save and space.keep_x else nothing,
        "shared_gate_up": (layer.x.shape[0], 2 * space.shared_intermediate)
        if save and space.shared_intermediate
        else nothing,
    }


def _empty_saved(layer: Layer, save: bool) -> Saved:
    return Saved(*(layer.x.new_empty(shape) for shape in _saved_shapes(layer, save).values()))


# Checks of metadata, the same for real and fake tensors.


def _check_topk_idx(space: Workspace, topk_idx: Tensor) -> None:
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise argument_error("topk_idx", topk_idx.dtype, "torch.int32 or torch.int64")
    if topk_idx.dim() != 2 or topk_idx.shape[1] != space.topk:
        raise argument_error("topk_idx", f"shape {list(topk_idx.shape)}", f"[tokens, K = {space.topk}]")
    _check_device(space, "topk_idx", topk_idx)


def _check_layer(layer: Layer) -> None:
    space, x = layer.space, layer.x
    if x.dim() != 2 or x.shape[1] != space.hidden:
        raise argument_error("x", f"shape {list(x.shape)}", f"[tokens, H = {space.hidden}]")
    _check_bf16(space, "x", x)
    if layer.topk_weights.dtype not in (torch.float32, torch.bfloat16):
        raise argument_error("topk_weights", layer.topk_weights.dtype, "torch.float32 or torch.bfloat16")
    _check_shape(space, "topk_weights", layer.topk_weights, (x.shape[0], space.topk))
    if layer.schedule.dtype != torch.int32:
        raise argument_error("schedule", layer.schedule.dtype, "the int32 table of a schedule")
    _check_shape(space, "schedule", layer.schedule, (space.ranks, space.schedule_words))

    shared = space.shared_intermediate
    shapes = {
        "w13": (space.num_experts, 2 * space.intermediate, space.hidden),
        "w2": (space.num_experts, space.hidden, space.intermediate),
        "shared_w13": (2 * shared, space.hidden),
        "shared_w2": (space.hidden, shared),
    }
    for (name, shape), weight in zip(shapes.items(), layer.weights):
        if name.startswith("shared") and (weight is None) != (shared == 0):
            was, may_be = ("None", "given") if weight is None else ("given", "None")
            raise argument_error(name, was, f"{may_be} for a workspace with shared_intermediate={shared}")
        if weight is not None:
            _check_bf16(space, name, weight)
            _check_shape(space, name, weight, shape)


def _check_saved(layer: Layer, saved: Saved) -> None:
    for (name, shape), tensor in zip(_saved_shapes(layer, True).items(), saved):
        if tensor.dtype != torch.bfloat16 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            was = f"{tensor.dtype}, shape {list(tensor.shape)}"
            raise argument_error(f"saved.{name}", was, f"as forward left it: torch.bfloat16, shape {list(shape)}")
        _check_device(layer.space, f"saved.{name}", tensor)


def _check_gradients(layer: Layer, dout: Tensor, weight_dtype: torch.dtype, mains: Sequence[Tensor | None]) -> None:
    _check_bf16(layer.space, "dout", dout)
    _check_shape(layer.space, "dout", dout, tuple(layer.x.shape))
    if weight_dtype not in (torch.bfloat16, torch.float32):
        raise argument_error("weight_dtype", weight_dtype, "torch.bfloat16 or torch.float32")
    for name, weight, main in zip(("w13", "w2", "shared_w13", "shared_w2"), layer.weights, mains):
        if weight is None or main is None:
            continue
        name = f"main_grads[{name!r}]"
        if main.dtype not in (torch.bfloat16, torch.float32):
            raise argument_error(name, main.dtype, "torch.float32 or torch.bfloat16")
        _check_shape(layer.space, name, main, tuple(weight.shape))
        if not main.is_contiguous():
            raise argument_error(name, f"strides {main.stride()}", "contiguous, as it is written in place")


def _check_bf16(space: Workspace, name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.bfloat16:
        may_be = "torch.bfloat16"
        if name != "dout":
            may_be += f', or clowder.moe or clowder.nn.MoE under torch.autocast("{space.device.type}", torch.bfloat16)'
        raise argument_error(name, tensor.dtype, may_be)
    _check_device(space, name, tensor)


def _check_shape(space: Workspace, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise argument_error(name, f"shape {list(tensor.shape)}", f"{list(shape)} for {space}")
    _check_device(space, name, tensor)


def _check_device(space: Workspace, name: str, tensor: Tensor) -> None:
    if tensor.device.type != space.device.type:
        raise argument_error(name, f"on {tensor.device}", f"on the workspace's device {space.device}")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()
