"""Routers: which experts a token goes to, and with which weights.

A router is a module that maps tokens [T, H] to `Routes`, and has a `weight` [E, H]. A token's routes depend on that token
alone, and the whole global batch is routed at once, so they do not depend on the number of ranks. Where scores are equal,
the lower expert comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from ..errors import argument_error
from ..numbers import finite, integer, positive


class Routes(NamedTuple):
    """A router's result.

    Attributes:
        topk_idx: [T, K] int64.
        topk_weights: [T, K] fp32.
        scores: [T, E] fp32, a distribution over experts for each token, what a balance loss is made from; None is no loss.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    scores: Tensor | None = None


class _Router(nn.Module):
    """What the routers share: the weight, and logits in fp32 whatever autocast says."""

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        positive("hidden", hidden)
        positive("num_experts", num_experts)
        if positive("topk", topk) > num_experts:
            raise argument_error("topk", topk, f"at most the {num_experts} experts that a token can choose among")
        self.topk = topk
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Draws the weight anew, normal(0, std)."""
        nn.init.normal_(self.weight, std=std)

    def logits(self, x: Tensor) -> Tensor:
        """x @ weight.T, [T, E] fp32."""
        return _Fp32Linear.apply(x, self.weight)

    def extra_repr(self) -> str:
        num_experts, hidden = self.weight.shape
        return f"{hidden}, {num_experts}, topk={self.topk}"


class _Fp32Linear(torch.autograd.Function):
    """x @ weight.T in fp32, forward and backward, whatever autocast says: it would round logits, and near ties with them. A
    compiled backward pass runs under forward's autocast, so backward turns it off itself. Saves x as it came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return x.float() @ weight.float().T

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            dx = (dlogits @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
            dweight = (dlogits.T @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight


class SoftmaxRouter(_Router):
    """softmax(x @ weight.T) in fp32, the K largest of each token.

    Args:
        hidden: H.
        num_experts: E.
        topk: K.
        renormalise: divide a token's K weights by their sum.
        device: of the weight.
        dtype: of the weight.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        *,
        renormalise: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, num_experts, topk, device, dtype)
        self.renormalise = renormalise
        self.reset_parameters()

    def forward(self, x: Tensor) -> Routes:
        scores = torch.softmax(self.logits(x), dim=-1)
        topk_idx = torch.ops.clowder.choose_experts(scores.detach(), self.topk, 1, 1)
        topk_weights = scores.gather(1, topk_idx)
        if self.renormalise:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        return Routes(topk_idx, topk_weights, scores)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, renormalise={self.renormalise}"


class DeepSeekV3Router(_Router):
    """The router of DeepSeek-V3 (2024, section 2.1.2): sigmoid scores, and balance by a bias instead of a loss.

    A token's scores are sigmoid(x @ weight.T) in fp32. For the choice alone, `expert_bias` is added to them; the token's
    experts are the K largest in its `topk_group` best of `n_group` groups of consecutive experts, a group's score being the
    sum of its two largest. The weights are the chosen experts' scores without the bias, divided by their sum, times
    `scaling_factor`. After each optimizer step, call `update_bias`.

    `expert_bias` [E] is a buffer, and stays fp32 when the module is cast: steps of the usual size vanish in bf16.

    Args:
        hidden: H.
        num_experts: E.
        topk: K.
        n_group: groups of equal size; 1 is none.
        topk_group: groups that a token may choose from.
        scaling_factor: of the weights.
        renormalise: divide a token's K weights by their sum.
        device: of the weight.
        dtype: of the weight.
    """

    expert_bias: Tensor

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        *,
        n_group: int = 1,
        topk_group: int = 1,
        scaling_factor: float = 1.0,
        renormalise: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, num_experts, topk, device, dtype)
        if integer("n_group", n_group) < 1 or num_experts % n_group != 0:
            raise argument_error("n_group", n_group, f"a divisor of the {num_experts} experts")
        if not 1 <= integer("topk_group", topk_group) <= n_group:
            raise argument_error("topk_group", topk_group, f"from 1 to n_group = {n_group}")
        if topk > topk_group * (num_experts // n_group):
            may_be = f"at most the {topk_group * (num_experts // n_group)} experts of topk_group = {topk_group} groups"
            raise argument_error("topk", topk, may_be)
        self.n_group = n_group
        self.topk_group = topk_group
        self.scaling_factor = finite("scaling_factor", scaling_factor)
        self.renormalise = renormalise
        self.register_buffer("expert_bias", torch.empty(num_experts, device=device, dtype=torch.float32))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Draws the weight anew, normal(0, std), and sets the bias to 0."""
        super().reset_parameters(std)
        self.expert_bias.zero_()

    def forward(self, x: Tensor) -> Routes:
        scores = torch.sigmoid(self.logits(x))
        topk_idx = torch.ops.clowder.choose_experts(
            scores.detach() + self.expert_bias, self.topk, self.n_group, self.topk_group
        )
        topk_weights = scores.gather(1, topk_idx)
        if self.renormalise:
            topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + _TINY)
        distribution = scores / (scores.sum(dim=-1, keepdim=True) + _TINY)
        return Routes(topk_idx, topk_weights * self.scaling_factor, distribution)

    @torch.no_grad()
    def update_bias(
        self,
        expert_counts: Tensor,
        rate: float = 1e-3,
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """expert_bias += rate * sign(mean load - load), for each expert; after an optimizer step.

        Args:
            expert_counts: [E] rows of each expert in the step, `MoE.expert_counts` added up over its micro-batches.
            rate: the bias update speed, 0.001 in DeepSeek-V3.
            process_group: data-parallel processes over which counts are added up first; None is this process alone.

        Raises:
            ClowderError: "argument".
        """
        if not isinstance(expert_counts, Tensor) or expert_counts.shape != self.expert_bias.shape:
            was = f"shape {list(expert_counts.shape)}" if isinstance(expert_counts, Tensor) else repr(expert_counts)
            raise argument_error("expert_counts", was, f"[E = {self.expert_bias.shape[0]}]")
        rate = finite("rate", rate)
        load = expert_counts.to(torch.float64)  # exact: counts are below 2**53
        if process_group is not None:
            torch.distributed.all_reduce(load, group=process_group)
        self.expert_bias += rate * torch.sign(load.mean() - load).to(self.expert_bias.dtype)

    def extra_repr(self) -> str:
        groups = f"n_group={self.n_group}, topk_group={self.topk_group}"
        return f"{super().extra_repr()}, {groups}, scaling_factor={self.scaling_factor}, renormalise={self.renormalise}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeepSeekV3Router:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self


_TINY = 1e-20  # keeps a sum of scores that all underflowed from dividing 0 by 0

ROUTERS: dict[str, Callable[..., _Router]] = {"softmax": SoftmaxRouter, "deepseek_v3": DeepSeekV3Router}


def make_router(name: str, hidden: int, num_experts: int, topk: int, **options: Any) -> nn.Module:
    """The router of this name.

    Raises:
        ClowderError: "argument" if there is none, or it does not have such an option.
    """
    if name not in ROUTERS:
        may_be = f"{' or '.join(repr(known) for known in ROUTERS)}, or a module"
        raise argument_error("router", repr(name), may_be)
    try:
        return ROUTERS[name](hidden, num_experts, topk, **options)
    except TypeError as error:
        raise argument_error("router_options", str(error), f"options of the router {name!r}") from None


def load_balance_loss(scores: Tensor, expert_counts: Tensor, topk: int) -> Tensor:
    """The load-balance loss of Switch Transformers (Fedus et al. 2021, eq. 4 to 6), for K choices a token.

    E * sum over experts of f_e * P_e, with f_e the fraction of all slots that went to e and P_e its mean score. It is 1
    where both are uniform. Differentiable in `scores` only.

    Args:
        scores: [T, E] fp32.
        expert_counts: [E], rows of each expert.
        topk: K.

    Returns:
        0-d fp32; 0 where there are no tokens.
    """
    tokens, num_experts = scores.shape
    fractions = expert_counts.to(scores.dtype) / max(tokens * topk, 1)
    mean_scores = scores.sum(dim=0) / max(tokens, 1)
    return num_experts * torch.dot(fractions, mean_scores)
