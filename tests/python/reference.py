"""The layer in fp64 by plain PyTorch, inputs to compare on, and bounds derived from the layer's roundings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import clowder

# Half a unit in the last place of bf16: the most that one rounding changes a value, relatively.
BF16_ROUNDING = 2.0**-8
# Roundings to bf16 on the longest way to each result (DESIGN: what the layer computes), a bf16 weight gradient's included.
# Each changes the result's norm by at most BF16_ROUNDING of it, times a sensitivity of the activation; independent
# roundings add up to far less, which leaves room for that.
ROUNDINGS = {
    "out": 5,  # g, u, h, y, out
    "x": 5,  # g, u, dg or du, dx of the slot, dx
    "topk_weights": 4,  # g, u, h, and its own where it is bf16
    "w13": 4,  # g, u, dg or du, dW
    "w2": 5,  # g, u, h, wh, dW
    "shared_w13": 4,
    "shared_w2": 5,
}


@dataclass
class Case:
    """Inputs of one layer. Routes and values depend on the global shape and the seed only."""

    hidden: int = 64
    intermediate: int = 32
    num_experts: int = 8
    topk: int = 2
    tokens: int = 24
    shared_intermediate: int = 0
    activation: str = "swiglu"
    seed: int = 0
    weights_dtype: torch.dtype = torch.float32
    dropped: float = 0.0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).to(torch.bfloat16)

        hidden, intermediate, experts = self.hidden, self.intermediate, self.num_experts
        shared = self.shared_intermediate
        self.x = (normal(self.tokens, hidden).float() * hidden**0.5).to(torch.bfloat16)
        self.topk_idx = torch.randint(experts, (self.tokens, self.topk), generator=generator)
        self.topk_idx[torch.rand(self.topk_idx.shape, generator=generator) < self.dropped] = -1
        self.topk_weights = torch.rand(self.tokens, self.topk, generator=generator).to(self.weights_dtype)
        self.w13 = normal(experts, 2 * intermediate, hidden)
        self.w2 = normal(experts, hidden, intermediate)
        self.shared_w13 = normal(2 * shared, hidden) if shared else None
        self.shared_w2 = normal(hidden, shared) if shared else None
        self.dout = (normal(self.tokens, hidden).float() * hidden**0.5).to(torch.bfloat16)

    def workspace(self, ranks: int = 1, **options: object) -> clowder.Workspace:
        max_tokens = options.pop("max_tokens", -(-self.tokens // ranks))
        return clowder.Workspace(
            self.hidden,
            self.intermediate,
            self.num_experts,
            self.topk,
            max_tokens,
            shared_intermediate=self.shared_intermediate,
            activation=self.activation,
            group=clowder.VirtualGroup(ranks),
            **options,
        )

    def inputs(self) -> dict[str, Tensor]:
        """The differentiable inputs."""
        names = ("x", "topk_weights", "w13", "w2", "shared_w13", "shared_w2")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def with_(self, **changes: object) -> Case:
        return replace(self, **changes)


def run(case: Case, workspace: clowder.Workspace, tokens_per_rank: list[int] | None = None) -> dict[str, Tensor]:
    """out and the gradient of every input through autograd, by name."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in case.inputs().items()}
    out = clowder.moe(topk_idx=case.topk_idx, workspace=workspace, tokens_per_rank=tokens_per_rank, **leaves)
    out.backward(case.dout)
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def reference(case: Case) -> dict[str, Tensor]:
    """The same in fp64, with no rounding; clamp masks come from bf16 values of g and u."""
    leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in case.inputs().items()}
    x = leaves["x"]
    out = torch.zeros_like(x)
    if case.shared_intermediate:
        out = out + mlp(x, leaves["shared_w13"], leaves["shared_w2"], case.activation)
    for slot in range(case.topk):
        for expert in range(case.num_experts):
            tokens = (case.topk_idx[:, slot] == expert).nonzero()[:, 0]
            y = mlp(x[tokens], leaves["w13"][expert], leaves["w2"][expert], case.activation)
            out = out.index_add(0, tokens, leaves["topk_weights"][tokens, slot, None] * y)
    out.backward(case.dout.double())
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def mlp(x: Tensor, w13: Tensor, w2: Tensor, activation: str) -> Tensor:
    g, u = (x @ w13.T).chunk(2, dim=-1)
    if activation == "gpt-oss" or ":" in activation:
        limit = 7.0 if activation == "gpt-oss" else float(activation.split(":")[1])
        rounded_g, rounded_u = g.detach().bfloat16().double(), u.detach().bfloat16().double()
        g = torch.where(rounded_g > limit, limit, g)
        u = torch.where(rounded_u > limit, limit, torch.where(rounded_u < -limit, -limit, u))
    if activation == "geglu":
        h = torch.nn.functional.gelu(g, approximate="tanh") * u
    elif activation == "reglu":
        h = torch.relu(g) * u
    elif activation == "gpt-oss":
        h = (u + 1) * g * torch.sigmoid(1.702 * g)
    else:
        h = torch.nn.functional.silu(g) * u
    return h @ w2.T


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; 0 if both are zero, infinite if only `expected` is."""
    difference, size = (actual.double() - expected).norm().item(), expected.norm().item()
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor is within its bound: the whole, and each block of 16 columns, so that a wrong tile cannot hide."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].shape == expected[name].shape, name
        assert torch.isfinite(actual[name]).all(), name
        bound = ROUNDINGS[name] * BF16_ROUNDING
        assert relative_error(actual[name], expected[name]) <= bound, name
        for a, e in zip(actual[name].split(16, dim=-1), expected[name].split(16, dim=-1)):
            # The number of elements of a block is smaller, and with it the averaging: twice the bound.
            assert relative_error(a, e) <= 2 * bound, name


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor], *, leave_out: tuple[str, ...] = ()) -> None:
    assert a.keys() == b.keys()
    for name in a:
        if name not in leave_out:
            assert a[name].dtype == b[name].dtype, name
            integer = torch.int16 if a[name].dtype == torch.bfloat16 else torch.int32
            assert torch.equal(a[name].view(integer), b[name].view(integer)), name
