"""The MoE layer as a module: router, experts and, if wanted, a shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import argument_error
from ..functional import routed
from ..group import VirtualGroup
from ..workspace import Workspace
from .router import load_balance_loss, make_router


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
        router: "softmax".
        group: the expert-parallel group; None is one rank.
        max_tokens: the most tokens of one rank in a call. None fits the workspace to the calls: a call with more tokens
            than any before makes a larger one.
        aux_loss_coefficient: factor of `aux_loss`; 0 is none.
        renormalise: whether a token's K weights are divided by their sum.
        workspace: one to share with other layers of equal shape; `group` and `max_tokens` are then its own.
        ring_rows: see `Workspace`.
        saved_rows: see `Workspace`.
        keep_x: see `Workspace`.
        timeout_s: see `Workspace`.
        num_layers: layers of the model, for the initialisation.
        device: of the parameters.
        dtype: of the parameters, torch.bfloat16 if None. torch.float32 parameters need torch.autocast with bf16, which
            casts them for each call and their gradients back, so that an optimizer sees fp32 master weights.

    Attributes:
        aux_loss: 0-d fp32, the load-balance loss of the last call times `aux_loss_coefficient`, to be added to the
            training loss; None before any call. It belongs to the call's graph.
        expert_counts: [E] int64, rows of each expert in the last call; None before any.

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
        router: str = "softmax",
        group: VirtualGroup | None = None,
        max_tokens: int | None = None,
        aux_loss_coefficient: float = 0.01,
        renormalise: bool = True,
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
        self.aux_loss_coefficient = aux_loss_coefficient
        self.num_layers = num_layers
        self.aux_loss: Tensor | None = None
        self.expert_counts: Tensor | None = None

        self._shape = {
            "hidden": hidden,
            "intermediate": intermediate,
            "num_experts": num_experts,
            "topk": topk,
            "shared_intermediate": shared_intermediate,
            "activation": activation,
        }
        self._options = {
            "group": VirtualGroup(1) if group is None else group,
            "ring_rows": ring_rows,
            "saved_rows": saved_rows,
            "keep_x": keep_x,
            "timeout_s": timeout_s,
            "device": device,
        }
        self._may_grow = workspace is None and max_tokens is None
        if workspace is None:
            self.workspace = self._make_workspace(0 if max_tokens is None else max_tokens)
        else:
            for name, value in self._shape.items():
                if getattr(workspace, name) != value:
                    raise argument_error("workspace", f"of {name} = {getattr(workspace, name)!r}", f"of {value!r}")
            if group is not None and group.ranks != workspace.ranks:
                raise argument_error("group", repr(group), f"left out, or the workspace's of {workspace.ranks} ranks")
            own = {"max_tokens": max_tokens, "ring_rows": ring_rows, "saved_rows": saved_rows, "keep_x": keep_x or None}
            for name, value in own.items():
                if value is not None:
                    raise argument_error(name, value, "left out where a workspace is given, which has its own")
            self.workspace = workspace

        dtype = torch.bfloat16 if dtype is None else dtype
        factory = {"device": device, "dtype": dtype}
        self.router = make_router(router, hidden, num_experts, topk, renormalise=renormalise, **factory)
        self.w13 = nn.Parameter(torch.empty(num_experts, 2 * intermediate, hidden, **factory))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden, intermediate, **factory))
        if shared_intermediate > 0:
            self.shared_w13 = nn.Parameter(torch.empty(2 * shared_intermediate, hidden, **factory))
            self.shared_w2 = nn.Parameter(torch.empty(hidden, shared_intermediate, **factory))
        else:
            self.register_parameter("shared_w13", None)
            self.register_parameter("shared_w2", None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the parameters anew."""
        std = 0.02
        residual_std = std if self.num_layers is None else std / (2 * self.num_layers) ** 0.5
        nn.init.normal_(self.router.weight, std=std)
        for weight, weight_std in (
            (self.w13, std),
            (self.w2, residual_std),
            (self.shared_w13, std),
            (self.shared_w2, residual_std),
        ):
            if weight is not None:
                nn.init.normal_(weight, std=weight_std)

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
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise argument_error("x", f"shape {list(x.shape)}", f"[..., H = {self.hidden}]")
        tokens = x.reshape(-1, self.hidden)
        self._fit_workspace(tokens.shape[0])
        routes = self.router(tokens)
        schedule = self.workspace.build_schedule(routes.topk_idx)
        self.expert_counts = schedule.expert_counts
        loss = load_balance_loss(routes.scores, schedule.expert_counts, self.workspace.topk)
        self.aux_loss = self.aux_loss_coefficient * loss
        out = routed(
            self.workspace, schedule, tokens, routes.topk_weights, self.w13, self.w2, self.shared_w13, self.shared_w2
        )
        return out.reshape(x.shape)

    def extra_repr(self) -> str:
        shape = ", ".join(f"{name}={value!r}" for name, value in self._shape.items())
        return f"{shape}, group={self.workspace.group}"

    def __getstate__(self) -> dict[str, object]:
        # A copy starts before any call; a call's graph cannot be copied.
        return {**self.__dict__, "aux_loss": None, "expert_counts": None}

    def _make_workspace(self, max_tokens: int) -> Workspace:
        return Workspace(**self._shape, **self._options, max_tokens=max_tokens)  # type: ignore[arg-type]

    def _fit_workspace(self, tokens: int) -> None:
        per_rank = -(-tokens // self.workspace.ranks)
        if self._may_grow and per_rank > self.workspace.max_tokens:
            self.workspace = self._make_workspace(per_rank)
