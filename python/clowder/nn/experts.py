"""The experts' parameters of a module, in one of three layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import argument_error
from ..weights import NAMES, Weight, flatten, unflatten

LAYOUTS = ("stacked", "separate", "per_expert")


def add_parameters(
    module: nn.Module,
    layout: str,
    num_experts: int,
    hidden: int,
    intermediate: int,
    shared_intermediate: int,
    new: Callable[..., Tensor],
) -> None:
    """Registers the parameters of a layout, made by `new` from their sizes.

    "stacked": `w13` [E, 2I, H] and `w2` [E, H, I]. "separate": `w1`, `w3` [E, I, H] and `w2`. "per_expert": lists `w13` of
    [2I, H] and `w2` of [H, I]. A shared expert has `shared_w13` [2Is, H], with "separate" `shared_w1` and `shared_w3`
    [Is, H], and `shared_w2` [H, Is]; None where there is none.

    Raises:
        ClowderError: "argument" if there is no such layout.
    """
    if layout not in LAYOUTS:
        raise argument_error("layout", repr(layout), " or ".join(repr(known) for known in LAYOUTS))
    matrices = {"w13": (2 * intermediate, hidden), "w2": (hidden, intermediate)}
    shared = {"shared_w13": (2 * shared_intermediate, hidden), "shared_w2": (hidden, shared_intermediate)}
    if layout == "separate":
        half = (intermediate, hidden)
        matrices = {"w1": half, "w3": half, "w2": matrices["w2"]}
        half = (shared_intermediate, hidden)
        shared = {"shared_w1": half, "shared_w3": half, "shared_w2": shared["shared_w2"]}
    for name, shape in matrices.items():
        if layout == "per_expert":
            setattr(module, name, nn.ParameterList(nn.Parameter(new(*shape)) for _ in range(num_experts)))
        else:
            module.register_parameter(name, nn.Parameter(new(num_experts, *shape)))
    for name, shape in shared.items():
        module.register_parameter(name, nn.Parameter(new(*shape)) if shared_intermediate > 0 else None)


def weights_of(module: Any, layout: str) -> dict[str, Any]:
    """The module's parameters as arguments of `clowder.moe`."""
    if layout != "separate":
        return {name: _as_weight(getattr(module, name)) for name in NAMES}
    has_shared = module.shared_w2 is not None
    return {
        "w13": (module.w1, module.w3),
        "w2": module.w2,
        "shared_w13": (module.shared_w1, module.shared_w3) if has_shared else None,
        "shared_w2": module.shared_w2,
    }


def main_grads_of(weights: Mapping[str, Weight | None]) -> dict[str, Weight | None]:
    """`main_grad` of every parameter that needs a gradient, in the weights' forms; None for weights that need none.

    Raises:
        ClowderError: "argument" if one is missing.
    """
    return {name: None if weight is None else _main_grads(name, weight) for name, weight in weights.items()}


@torch.no_grad()
def reset(weights: Mapping[str, Weight | None], std: float, residual_std: float) -> None:
    """Draws the weights anew: normal(0, std), those that write to the residual stream normal(0, residual_std)."""
    for name, weight in weights.items():
        for tensor in flatten(name, weight):
            nn.init.normal_(tensor, std=residual_std if name.endswith("w2") else std)


def _as_weight(parameter: Tensor | nn.ParameterList | None) -> Weight | None:
    return tuple(parameter) if isinstance(parameter, nn.ParameterList) else parameter


def _main_grads(name: str, weight: Weight) -> Weight | None:
    parameters = flatten(name, weight)
    if not any(parameter.requires_grad for parameter in parameters):
        return None
    main_grads = [getattr(parameter, "main_grad", None) for parameter in parameters]
    if any(main_grad is None for main_grad in main_grads):
        raise argument_error("main_grad", f"none on {name}", "a tensor, where gradient_accumulation_fusion is set")
    return unflatten(weight, main_grads)
