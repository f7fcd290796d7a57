"""Routers: which experts a token goes to, and with which weights.

A router is a module with `weight` [E, H] that maps tokens [T, H] to `Routes`. A token's routes depend on that token alone,
and the whole global batch is routed at once, so they do not depend on the number of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import argument_error


class Routes(NamedTuple):
    """A router's result.

    Attributes:
        topk_idx: [T, K] int64.
        topk_weights: [T, K] fp32.
        scores: [T, E] fp32, a distribution over experts for each token; what a balance loss is made from.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    scores: Tensor


class SoftmaxRouter(nn.Module):
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
        super().__init__()
        if topk > num_experts:
            raise argument_error("topk", topk, f"at most the {num_experts} experts that a token can choose among")
        self.topk = topk
        self.renormalise = renormalise
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Routes:
        # Autocast would round the logits, and near ties with them.
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.softmax(nn.functional.linear(x.float(), self.weight.float()), dim=-1)
            topk_weights, topk_idx = torch.topk(scores, self.topk, dim=-1)
            if self.renormalise:
                topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        return Routes(topk_idx, topk_weights, scores)

    def extra_repr(self) -> str:
        num_experts, hidden = self.weight.shape
        return f"{hidden}, {num_experts}, topk={self.topk}, renormalise={self.renormalise}"


ROUTERS = {"softmax": SoftmaxRouter}


def make_router(name: str, hidden: int, num_experts: int, topk: int, **options: object) -> nn.Module:
    """The router of this name.

    Raises:
        ClowderError: "argument" if there is none.
    """
    if name not in ROUTERS:
        raise argument_error("router", repr(name), " or ".join(repr(known) for known in ROUTERS))
    return ROUTERS[name](hidden, num_experts, topk, **options)  # type: ignore[arg-type]


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
