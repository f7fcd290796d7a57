"""The operators torch.ops.clowder.*: functional, with fake implementations and autograd.

    build_schedule(topk_idx, workspace, tokens_per_rank, *sizes) -> (table, expert_counts, skipped_ids)
    forward(*layer, saved_rows, keep_x, save_rows, save_shared, *main_grads) -> (out, gate_up, saved_x, shared_gate_up)
    backward(*layer, *saved, dout, needs, weight_dtype) -> gradients of (x, topk_weights, w13, w2, shared_w13, shared_w2)
    backward_into(*layer, *saved, dout, needs, *into, adds) -> gradients of (x, topk_weights): the weights' are written to the
        tensors `into`, or added where `adds` is set; a weight without any gets none
    choose_experts(scores, topk, n_group, topk_group) -> topk_idx

`layer` are the fields of `Layer`. `workspace` is a handle (see `engine.py`), `tokens_per_rank` None an even split. Fakes
read no state of the process: what their shapes need arrives as an argument. A tensor that an operator has no use for (a
gradient nobody needs, nothing saved) is empty, of shape [0], and a weight's gradient has no tensors. Outputs are fresh and
contiguous. Forward does not read `main_grads`; its derivative adds to them. The functions of `functional.py` are what users
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks, weights
from ._core import GradientAddresses, GradientMode, PassAddresses, SavedAddresses, WeightAddresses
from .engine import Engine, engine_of
from .errors import ClowderError, argument_error

_LAYER = (
    "Tensor x, Tensor topk_weights, Tensor[] w13, Tensor[] w2, Tensor[] shared_w13, Tensor[] shared_w2, "
    "Tensor schedule, Tensor workspace, SymInt[]? tokens_per_rank"
)
_FORWARD = f"{_LAYER}, SymInt saved_rows, bool keep_x, bool save_rows, bool save_shared"
_BACKWARD = f"{_LAYER}, Tensor gate_up, Tensor saved_x, Tensor shared_gate_up, Tensor dout, bool[] needs"
_MAINS = "Tensor[] main_w13, Tensor[] main_w2, Tensor[] main_shared_w13, Tensor[] main_shared_w2"
_INTO = "Tensor(a!)[] into_w13, Tensor(b!)[] into_w2, Tensor(c!)[] into_shared_w13, Tensor(d!)[] into_shared_w2"
_GRADIENTS = "(Tensor, Tensor, Tensor[], Tensor[], Tensor[], Tensor[])"

FlatWeights = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


class Layer(NamedTuple):
    """What every pass reads, in the order of the operators' arguments. Weights are flat lists (see `weights.py`)."""

    x: Tensor
    topk_weights: Tensor
    w13: list[Tensor]
    w2: list[Tensor]
    shared_w13: list[Tensor]
    shared_w2: list[Tensor]
    schedule: Tensor
    workspace: Tensor
    tokens_per_rank: Sequence[int] | None

    @property
    def weights(self) -> FlatWeights:
        return (self.w13, self.w2, self.shared_w13, self.shared_w2)


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


class _Read:
    """A layer as the engine reads it, by copies where needed. Addresses are good as long as this is kept."""

    def __init__(self, engine: Engine, layer: Layer) -> None:
        self.tokens_per_rank = checks.split_tokens(engine, layer.x.shape[0], layer.tokens_per_rank)
        self.x = layer.x.contiguous()
        self.topk_weights = layer.topk_weights.to(torch.float32).contiguous()
        self.weights = weights.contiguous(layer.weights)
        self.split = _split(engine, layer)
        self.schedule = layer.schedule.contiguous()
        self.experts = engine.num_experts

    def addresses(self, saved: Saved) -> PassAddresses:
        return PassAddresses(
            self.tokens_per_rank,
            _address(self.schedule),
            _address(self.x),
            _address(self.topk_weights),
            WeightAddresses(*weights.tables(self.weights, self.split, (self.experts, 1))),
            SavedAddresses(*(_address(tensor) for tensor in saved)),
        )


def _operator(name: str, schema: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    return torch.library.custom_op(f"clowder::{name}", mutates_args=mutates_args, schema=schema)


@_operator(
    "build_schedule",
    "(Tensor topk_idx, Tensor workspace, SymInt[]? tokens_per_rank, SymInt ranks, SymInt num_experts, "
    "SymInt schedule_words) -> (Tensor, Tensor, Tensor)",
)
def build_schedule(
    topk_idx: Tensor,
    workspace: Tensor,
    tokens_per_rank: Sequence[int] | None,
    ranks: int,
    num_experts: int,
    schedule_words: int,
) -> tuple[Tensor, Tensor, Tensor]:
    engine = engine_of(workspace)
    checks.check_topk_idx(engine, topk_idx)
    # First, because in compiled code this is where a workspace is found too small.
    tokens = checks.split_tokens(engine, topk_idx.shape[0], tokens_per_rank)
    checks.check_sizes(engine, ranks=ranks, num_experts=num_experts, schedule_words=schedule_words)
    topk_idx = topk_idx.contiguous()
    # Zeros, because the engine leaves the tails of the worst case as they were.
    table = topk_idx.new_zeros((ranks, schedule_words), dtype=torch.int32)
    expert_counts = topk_idx.new_empty((num_experts,), dtype=torch.int64)
    is_int64 = topk_idx.dtype == torch.int64
    skipped = engine.core.build_schedule(_address(topk_idx), is_int64, tokens, _address(table), _address(expert_counts))
    engine.count_skipped(skipped)
    return table, expert_counts, topk_idx.new_full((), skipped, dtype=torch.int64)


@build_schedule.register_fake
def _(
    topk_idx: Tensor,
    workspace: Tensor,
    tokens_per_rank: Sequence[int] | None,
    ranks: int,
    num_experts: int,
    schedule_words: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        topk_idx.new_empty((ranks, schedule_words), dtype=torch.int32),
        topk_idx.new_empty((num_experts,), dtype=torch.int64),
        topk_idx.new_empty((), dtype=torch.int64),
    )


@_operator("forward", f"({_FORWARD}, {_MAINS}) -> (Tensor, Tensor, Tensor, Tensor)")
def forward(*arguments: Any) -> tuple[Tensor, ...]:
    layer, options = Layer(*arguments[:9]), arguments[9:13]
    engine = engine_of(layer.workspace)
    checks.check_layer(engine, layer.x, layer.topk_weights, layer.weights, layer.schedule)
    checks.check_sizes(engine, saved_rows=options[0], keep_x=options[1])
    out = layer.x.new_empty(layer.x.shape)
    saved = _empty_saved(layer, *options)
    read = _Read(engine, layer)
    engine.core.forward(read.addresses(saved), any(options[2:]), _address(out))
    return (out, *saved)


@forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    layer = Layer(*arguments[:9])
    return (layer.x.new_empty(layer.x.shape), *_empty_saved(layer, *arguments[9:13]))


@_operator("backward", f"({_BACKWARD}, ScalarType weight_dtype) -> {_GRADIENTS}")
def backward(*arguments: Any) -> tuple[Any, ...]:
    *rest, needs, weight_dtype = arguments
    into = _new_gradients(Layer(*arguments[:9]), needs, weight_dtype)
    return (*_run_backward(*rest, needs, *into, (False,) * 4), *into)


@_operator(
    "backward_into",
    f"({_BACKWARD}, {_INTO}, bool[] adds) -> (Tensor, Tensor)",
    ("into_w13", "into_w2", "into_shared_w13", "into_shared_w2"),
)
def backward_into(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _run_backward(*arguments)


def _run_backward(*arguments: Any) -> tuple[Tensor, Tensor]:
    layer, saved, (dout, needs) = Layer(*arguments[:9]), Saved(*arguments[9:12]), arguments[12:14]
    into, adds = list(arguments[14:18]), arguments[18]
    engine, x, topk_weights = engine_of(layer.workspace), layer.x, layer.topk_weights
    checks.check_layer(engine, x, topk_weights, layer.weights, layer.schedule)
    shapes = _saved_shapes(layer, engine.saved_rows, engine.keep_x, True, True)
    checks.check_saved(engine, Saved._fields, saved, shapes)
    checks.check_dout(engine, dout, x)
    checks.check_into(engine, layer.weights, into)
    dx, dtopk_weights = _new_input_gradients(layer, needs)
    dtopk_weights = dtopk_weights.to(torch.float32)

    # A pass has one mode. Where gradients differ in theirs, or a shared expert's come from several ranks, the engine
    # writes fp32; the sum over ranks, the addition and the one rounding are done here.
    modes = {(add, tensors[0].dtype) for tensors, add in zip(into, adds) if tensors}
    is_direct = len(modes) <= 1 and not (engine.ranks > 1 and any(into[2:]))
    mode = _MODES[modes.pop() if is_direct and modes else (False, torch.float32)]
    ranks = 1 if is_direct else engine.ranks
    buffers = into
    if not is_direct:
        leading = ((), (), (ranks,), (ranks,))
        buffers = [weights.empty_like(tensors, torch.float32, lead) for tensors, lead in zip(into, leading)]

    read, dout = _Read(engine, layer), dout.contiguous()
    tables = weights.tables(buffers, read.split, (engine.num_experts, ranks))
    gradients = GradientAddresses(_address(dx), _address(dtopk_weights), *tables)
    engine.core.backward(read.addresses(saved), _address(dout), gradients, mode)

    if not is_direct:
        sums = [*buffers[:2], *([_sum_in_order(buffer) for buffer in of_shared] for of_shared in buffers[2:])]
        for tensors, gradients_of_weight, add in zip(into, sums, adds):
            for tensor, gradient in zip(tensors, gradients_of_weight):
                tensor.add_(gradient) if add else tensor.copy_(gradient)
    return dx, dtopk_weights.to(topk_weights.dtype)


_MODES = {
    (False, torch.bfloat16): GradientMode.WRITE_BF16,
    (False, torch.float32): GradientMode.WRITE_FP32,
    (True, torch.bfloat16): GradientMode.ACCUMULATE_BF16,
    (True, torch.float32): GradientMode.ACCUMULATE_FP32,
}


@backward.register_fake
def _(*arguments: Any) -> tuple[Any, ...]:
    layer, (needs, weight_dtype) = Layer(*arguments[:9]), arguments[-2:]
    return (*_new_input_gradients(layer, needs), *_new_gradients(layer, needs, weight_dtype))


@backward_into.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    layer = Layer(*arguments[:9])
    return _new_input_gradients(layer, arguments[13])


@_operator("choose_experts", "(Tensor scores, SymInt topk, SymInt n_group, SymInt topk_group) -> Tensor")
def choose_experts(scores: Tensor, topk: int, n_group: int, topk_group: int) -> Tensor:
    """The experts of the `topk` largest scores of each token, the lower index first where scores are equal.

    With groups, a token's experts come from its `topk_group` best of `n_group` groups of consecutive experts. A group's
    score is the sum of its two largest (DeepSeek-V3, 2024, section 2.1.2).
    """
    tokens, num_experts = scores.shape
    if n_group > 1:
        groups = scores.view(tokens, n_group, num_experts // n_group)
        of_group = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(dim=2)
        chosen = _descending(of_group)[:, :topk_group]
        is_left_out = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, chosen, False)
        scores = groups.masked_fill(is_left_out[:, :, None], -torch.inf).view(tokens, num_experts)
    return _descending(scores)[:, :topk].contiguous()


def _descending(values: Tensor) -> Tensor:
    # Stable: top-k may break ties in any way.
    return torch.sort(values, dim=1, descending=True, stable=True).indices


@choose_experts.register_fake
def _(scores: Tensor, topk: int, n_group: int, topk_group: int) -> Tensor:
    return scores.new_empty((scores.shape[0], topk), dtype=torch.int64)


# What decides where a token goes. It is small: K indices a token, and a schedule.
ROUTE_OPERATORS = frozenset((torch.ops.clowder.choose_experts.default, torch.ops.clowder.build_schedule.default))


# Autograd: forward's derivative is backward, which has none of its own.


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    layer, mains = Layer(*inputs[:9]), inputs[-4:]
    saved = output[1:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.is_saved = any(inputs[11:13])
    if ctx.is_saved:
        flat = [tensor for weight in layer.weights for tensor in weight]
        ctx.save_for_backward(layer.x, layer.topk_weights, layer.schedule, layer.workspace, *saved, *flat)
    ctx.lengths = [len(weight) for weight in layer.weights]
    ctx.tokens_per_rank = layer.tokens_per_rank
    ctx.mains = mains  # as attributes, because other backward passes write to them before this one does
    ctx.accumulated = layer.weights if any(mains) else None


def _differentiate_forward(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    is_needed = ctx.needs_input_grad
    needs = [is_needed[0], is_needed[1], *(any(of_weight) for of_weight in is_needed[2:6])]
    nothing: list[Any] = [None, None, *([None] * length for length in ctx.lengths)]
    rest = (None,) * 7 + tuple([None] * len(main) for main in ctx.mains)
    if dout is None or not any(needs):
        return (*nothing, *rest)
    if torch._C._functorch.is_legacy_batchedtensor(dout):  # torch.autograd.grad(..., is_grads_batched=True)
        _refuse_vmap()
    if not ctx.is_saved:
        raise argument_error("save", False, "True where a gradient will be asked for")
    x, topk_weights, schedule, workspace, gate_up, saved_x, shared_gate_up, *flat = ctx.saved_tensors
    of_each = iter(flat)
    layer_weights = [[next(of_each) for _ in range(length)] for length in ctx.lengths]
    layer = (x, topk_weights, *layer_weights, schedule, workspace, ctx.tokens_per_rank)
    arguments = (*layer, gate_up, saved_x, shared_gate_up, dout, needs)
    mains = [main if need else [] for main, need in zip(ctx.mains, needs[2:])]
    if not any(mains):
        gradients = list(torch.ops.clowder.backward(*arguments, torch.bfloat16))
    else:
        gradients = accumulate(Layer(*layer), arguments, mains, torch.bfloat16)
        for i, main in enumerate(mains, start=2):
            if main:
                gradients[i] = [_mark_accumulated(weight) for weight in ctx.accumulated[i - 2]]
    for i in range(2):
        if not needs[i]:
            gradients[i] = None
    for i in range(2, 6):
        gradients[i] = gradients[i] or nothing[i]
    return (*gradients, *rest)


def accumulate(
    layer: Layer, arguments: Sequence[Any], mains: Sequence[list[Tensor]], weight_dtype: torch.dtype
) -> list[Any]:
    """`backward` where some weights' gradients are added to their `mains`; the others are returned, in `weight_dtype`.

    Args:
        layer: to differentiate.
        arguments: of backward, without the last.
        mains: for each weight, its tensors' or none.
        weight_dtype: of the others.
    """
    needs = arguments[-1]
    left = [need and not main for need, main in zip(needs[2:], mains)]
    new = _new_gradients(layer, [*needs[:2], *left], weight_dtype)
    into = [main or tensors for main, tensors in zip(mains, new)]
    with torch.no_grad():
        of_inputs = torch.ops.clowder.backward_into(*arguments, *into, [bool(main) for main in mains])
    return [*of_inputs, *new]


def _mark_accumulated(weight: Tensor) -> Tensor | None:
    """Tells Megatron-LM, in its way, that the gradient has been added to `main_grad`, and gives it one to throw away:
    its hooks run for parameters that receive a gradient."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)


def _refuse_double_backward(ctx: Any, *_: Any) -> None:
    raise ClowderError("unsupported", "double backward: clowder's backward pass is not differentiable")


forward.register_autograd(_differentiate_forward, setup_context=_setup_forward)
backward.register_autograd(_refuse_double_backward)


def _refuse_vmap(*_: Any) -> None:
    raise ClowderError("unsupported", "vmap: clowder's operators take one batch; put the samples' tokens into it")


for _operator_of_batches in (build_schedule, forward, backward, choose_experts):
    _operator_of_batches.register_vmap(_refuse_vmap)


def _new_input_gradients(layer: Layer, needs: Sequence[bool]) -> tuple[Tensor, Tensor]:
    x, topk_weights = (
        tensor.new_empty(tensor.shape if need else (0,)) for tensor, need in zip((layer.x, layer.topk_weights), needs)
    )
    return x, topk_weights


def _new_gradients(layer: Layer, needs: Sequence[bool], dtype: torch.dtype) -> list[list[Tensor]]:
    """New tensors for the weights' gradients, none where none is needed."""
    return [weights.empty_like(weight, dtype) if need else [] for weight, need in zip(layer.weights, needs[2:])]


def _sum_in_order(per_rank: Tensor) -> Tensor:
    total = per_rank[0].clone()
    for of_rank in per_rank[1:]:
        total += of_rank
    return total


def _saved_shapes(
    layer: Layer, saved_rows: int, keep_x: bool, save_rows: bool, save_shared: bool
) -> list[tuple[int, ...]]:
    nothing = (0,)
    rows = (layer.schedule.shape[0], saved_rows)
    shapes = [
        (*rows, 2 * layer.w2[0].shape[-1]) if save_rows else nothing,
        (*rows, layer.x.shape[1]) if save_rows and keep_x else nothing,
    ]
    has_shared = save_shared and layer.shared_w2
    return [*shapes, (layer.x.shape[0], 2 * layer.shared_w2[0].shape[-1]) if has_shared else nothing]


def _empty_saved(layer: Layer, saved_rows: int, keep_x: bool, save_rows: bool, save_shared: bool) -> Saved:
    shapes = _saved_shapes(layer, saved_rows, keep_x, save_rows, save_shared)
    return Saved(*(layer.x.new_empty(shape) for shape in shapes))


def _split(engine: Engine, layer: Layer) -> tuple[bool, bool]:
    shared = weights.is_split(layer.shared_w13, engine.shared_intermediate)
    return (weights.is_split(layer.w13, engine.intermediate), shared)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()
