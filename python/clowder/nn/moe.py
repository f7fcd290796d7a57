"""The MoE layer as a module: router, experts and, if wanted, a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ClowderError, argument_error
from ..functional import refuse_transforms, routed
from ..group import VirtualGroup
from ..numbers import finite, positive
from ..weights import check_memory
from ..workspace import Workspace, as_device
from .experts import add_parameters, main_grads_of, reset, weights_of
from .router import Routes, load_balance_loss, make_router


class MoE(nn.Module):
    """A mixture-of-experts feed-forward layer.

    Parameters: `router.weight` [E, H]; `w13` [E, 2I, H], gate rows first; `w2` [E, H, I]; with a shared expert
    `shared_w13` [2Is, H] and `shared_w2` [H, Is].

    They start as normal(0, 0.02), but `w2` and `shared_w2` as normal(0, 0.02 / sqrt(2 * num_layers)), if `num_layers` is
    given, as in GPT-2.

    Args:
        hidden: H, a multiple of 32.
        intermediate: I, a multiple of 32.
        num_experts: E, a multiple of the group's ranks.
        topk: K, experts of a token, 1 to 16.
        shared_intermediate: Is, a multiple of 32; 0 is no shared expert.
        activation: "swiglu", "swiglu-clamp:LIMIT", "geglu", "reglu" or "gpt-oss", as in `clowder.Workspace`.
        router: "softmax", "deepseek_v3", or a module of your own that maps [T, H] to `Routes`.
        router_options: further arguments of `SoftmaxRouter` or `DeepSeekV3Router`, by name.
        group: the expert-parallel group; None is one rank.
        max_tokens: the most tokens of one rank in a call. None fits the workspace to the calls: a call with more tokens
            than any before makes a larger one. Compiled code cannot do so, and raises.
        aux_loss_coefficient: factor of `aux_loss`; 0 is none.
        renormalise: whether a token's K weights are divided by their sum.
        layout: of the experts' parameters. "stacked" are those above; "separate" has `w1`, `w3` [E, I, H] instead of `w13`,
            and `shared_w1`, `shared_w3`; "per_expert" has lists `w13` and `w2` of a matrix for each expert.
        gradient_accumulation_fusion: add the experts' gradients to the parameters' `main_grad` (bf16 or fp32) in backward,
            as in Megatron-LM, instead of to `grad`; see `main_grads` of `clowder.moe`.
        workspace: one to share with other layers of equal shape; `group` and `max_tokens` are then its own.
        ring_rows: see `Workspace`.
        saved_rows: see `Workspace`.
        keep_x: see `Workspace`.
        timeout_s: see `Workspace`.
        num_layers: layers of the model, for the initialisation.
        device: of the parameters; "meta" makes them without memory, for `to_empty` and `reset_parameters`.
        dtype: of the parameters, torch.bfloat16 if None. torch.float32 parameters need torch.autocast with bf16, which
            casts them for each call and their gradients back, so that an optimizer sees fp32 master weights.

    Attributes:
        expert_counts: [E] int64, rows of each expert in the last call; None before any. Recomputation in backward, for
            checkpointed activations, is no call.

    Raises:
        ClowderError: "argument" that names what cannot be used.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        topk: int,
        *,
        shared_intermediate: int = 0,
        activation: str = "swiglu",
        router: str | nn.Module = "softmax",
        router_options: Mapping[str, Any] | None = None,
        group: VirtualGroup | None = None,
        max_tokens: int | None = None,
        aux_loss_coefficient: float = 0.01,
        renormalise: bool = True,
        layout: str = "stacked",
        gradient_accumulation_fusion: bool = False,
        workspace: Workspace | None = None,
        ring_rows: int | None = None,
        saved_rows: int | None = None,
        keep_x: bool = False,
        timeout_s: float = 60.0,
        num_layers: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.aux_loss_coefficient = finite("aux_loss_coefficient", aux_loss_coefficient)
        self.layout = layout
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.num_layers = None if num_layers is None else positive("num_layers", num_layers)
        self.expert_counts: Tensor | None = None
        self._aux_loss: Tensor | None = None
        self._has_lost_graph = False

        self._shape = {
            "hidden": hidden,
            "intermediate": intermediate,
            "num_experts": num_experts,
            "topk": topk,
            "shared_intermediate": shared_intermediate,
            "activation": activation,
        }
        is_meta = as_device(device).type == "meta"
        self._options = {
            "group": VirtualGroup(1) if group is None else group,
            "ring_rows": ring_rows,
            "saved_rows": saved_rows,
            "keep_x": keep_x,
            "timeout_s": timeout_s,
            "device": None if is_meta else device,
        }
        self._may_grow = workspace is None and max_tokens is None
        if workspace is None:
            self.workspace = self._make_workspace(0 if max_tokens is None else max_tokens)
        else:
            own = {"max_tokens": max_tokens, "ring_rows": ring_rows, "saved_rows": saved_rows, "keep_x": keep_x or None}
            self.workspace = _shared_workspace(workspace, self._shape, group, own)

        dtype = torch.bfloat16 if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise argument_error("dtype", repr(dtype), "torch.bfloat16 or another floating type")

        def new(*sizes: int) -> Tensor:
            return torch.empty(*sizes, device=device, dtype=dtype)

        if isinstance(router, nn.Module):
            if router_options is not None:
                raise argument_error("router_options", router_options, "left out where a router is given")
            self.router = router
        else:
            options = {"renormalise": renormalise, "device": device, "dtype": dtype, **(router_options or {})}
            self.router = make_router(router, hidden, num_experts, topk, **options)
        add_parameters(self, layout, num_experts, hidden, intermediate, shared_intermediate, new)
        self._reset_experts()

    @property
    def aux_loss(self) -> Tensor | None:
        """0-d fp32, the load-balance loss of the last call times `aux_loss_coefficient`, to be added to the training loss;
        None before any call. It belongs to the call's graph.

        Raises:
            ClowderError: "unsupported" where it should have a graph and has none, because the call ran without one:
                reentrant checkpointing does that. In evaluation mode, and under torch.no_grad, it is only a number.
        """
        if self._has_lost_graph and torch.is_grad_enabled():
            message = (
                "aux_loss: the last call ran in training mode without gradients, so the balance loss cannot reach the "
                "router; use torch.utils.checkpoint with use_reentrant=False, or read it under torch.no_grad()"
            )
            raise ClowderError("unsupported", message)
        return self._aux_loss

    def reset_parameters(self) -> None:
        """Draws the parameters anew; a router of your own has its own `reset_parameters`, if any."""
        reset_router = getattr(self.router, "reset_parameters", None)
        if callable(reset_router):
            reset_router()
        self._reset_experts()

    def forward(self, x: Tensor) -> Tensor:
        """The layer on tokens.

        Args:
            x: [..., H] bf16 (under autocast any floating type), the ranks' tokens one after the other, split as evenly
                as can be.

        Returns:
            [..., H] bf16.

        Raises:
            ClowderError: "argument" or "timeout".
        """
        if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] != self.hidden:
            was = f"shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise argument_error("x", was, f"[..., H = {self.hidden}]")
        check_memory("x", x)
        refuse_transforms(x)
        tokens = x.reshape(-1, self.hidden)
        self._fit_workspace(tokens.shape[0])
        routes = self.router(tokens)
        if not isinstance(routes, Routes):
            raise argument_error("router", f"returned a {type(routes).__name__}", "a module that returns Routes")
        schedule = self.workspace.build_schedule(routes.topk_idx)
        self._remember(routes, schedule.expert_counts)
        weights = weights_of(self, self.layout)
        main_grads = main_grads_of(weights) if self.gradient_accumulation_fusion and torch.is_grad_enabled() else None
        out = routed(self.workspace, schedule, tokens, routes.topk_weights, **weights, main_grads=main_grads)
        return out.reshape(x.shape)

    def extra_repr(self) -> str:
        shape = ", ".join(f"{name}={value!r}" for name, value in self._shape.items())
        return f"{shape}, group={self.workspace.group}"

    def __getstate__(self) -> dict[str, object]:
        # A copy starts before any call; a call's graph cannot be copied.
        return {**self.__dict__, "_aux_loss": None, "expert_counts": None, "_has_lost_graph": False}

    def _reset_experts(self) -> None:
        std = 0.02
        residual_std = std if self.num_layers is None else std / (2 * self.num_layers) ** 0.5
        reset(weights_of(self, self.layout), std, residual_std)

    def _remember(self, routes: Routes, expert_counts: Tensor) -> None:
        if self.aux_loss_coefficient == 0.0 or routes.scores is None:
            loss, has_graph = routes.topk_weights.new_zeros(()), False
        else:
            balance = load_balance_loss(routes.scores, expert_counts, self.workspace.topk)
            loss, has_graph = self.aux_loss_coefficient * balance, True
        # Recomputation, in a backward pass, makes the same tensors, but is no call.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            is_trained = self.training and any(parameter.requires_grad for parameter in self.router.parameters())
            self._has_lost_graph = has_graph and is_trained and not torch.is_grad_enabled()
            self._aux_loss = loss
            self.expert_counts = expert_counts

    def _make_workspace(self, max_tokens: int) -> Workspace:
        advice = "; a layer without max_tokens makes its workspace larger in eager calls only: call it once before"
        options = {**self._shape, **self._options, "_limit_advice": advice if self._may_grow else ""}
        return Workspace(**options, max_tokens=max_tokens)  # type: ignore[arg-type]

    def _fit_workspace(self, tokens: int) -> None:
        # A compiled graph cannot make a workspace; where one is too small, build_schedule says so.
        if not self._may_grow or torch.compiler.is_compiling():
            return
        per_rank = -(-tokens // self.workspace.ranks)
        if per_rank > self.workspace.max_tokens:
            self.workspace = self._make_workspace(per_rank)


def _shared_workspace(
    workspace: Workspace, shape: Mapping[str, object], group: VirtualGroup | None, own: Mapping[str, object]
) -> Workspace:
    """The workspace, checked to suit the layer; `own` are options that it has and the layer must leave out."""
    if not isinstance(workspace, Workspace):
        raise argument_error("workspace", repr(workspace), "a clowder.Workspace")
    for name, value in shape.items():
        if getattr(workspace, name) != value:
            raise argument_error("workspace", f"of {name} = {getattr(workspace, name)!r}", f"of {value!r}")
    if group is not None and group.ranks != workspace.ranks:
        raise argument_error("group", repr(group), f"left out, or the workspace's of {workspace.ranks} ranks")
    for name, value in own.items():
        if value is not None:
            raise argument_error(name, value, "left out where a workspace is given, which has its own")
    return workspace
