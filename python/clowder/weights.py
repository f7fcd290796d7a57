"""The forms that weights may have, and the tables by which an engine finds each expert's matrices.

`w13` is one tensor [E, 2I, H]; a pair of w1 and w3 [E, I, H]; a list of every expert's [2I, H]; or a pair of lists of every
expert's w1 and w3 [I, H]. `w2` is one tensor [E, H, I], or a list of every expert's [H, I]. A shared expert's are those of
one expert. Operators take a weight as the flat list of its tensors, none where there is no shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ._core import Matrices
from .errors import argument_error

Weight: TypeAlias = Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]]

NAMES = ("w13", "w2", "shared_w13", "shared_w2")


def flatten(name: str, weight: Weight | None) -> list[Tensor]:
    """The tensors of a weight in any of its forms; none of None.

    Raises:
        ClowderError: "argument" if there is something else in it.
    """
    if weight is None:
        return []
    if isinstance(weight, Tensor):
        return [weight]
    may_be = "a tensor, or tensors in one of the forms that clowder.moe lists"
    if not hasattr(weight, "__iter__"):
        raise argument_error(name, repr(weight), may_be)
    flat: list[Any] = []
    for part in weight:
        flat.extend([part] if isinstance(part, Tensor) or not hasattr(part, "__iter__") else part)
    for tensor in flat:
        if not isinstance(tensor, Tensor):
            raise argument_error(name, f"with a {type(tensor).__name__} among its tensors", may_be)
    return flat


def check_memory(name: str, tensor: Tensor) -> None:
    """Refuses tensors that have none to point to, or another layout of it: operators do not get to see them."""
    if hasattr(tensor, "device_mesh"):
        raise argument_error(
            name, "a DTensor", "a plain tensor: to_local(), full_tensor(), or parameters under fully_shard"
        )
    if tensor.layout != torch.strided:
        raise argument_error(name, tensor.layout, "torch.strided")
    if tensor.device.type == "meta":
        raise argument_error(name, "on meta", "on the workspace's device")


def unflatten(weight: Weight | None, flat: Sequence[Any]) -> Any:
    """`flat`, one for each tensor of `weight`, in the form of `weight`."""
    rest = iter(flat)
    if weight is None:
        return None
    if isinstance(weight, Tensor):
        return next(rest)
    return tuple(next(rest) if isinstance(part, Tensor) else tuple(next(rest) for _ in part) for part in weight)


def check_form(
    name: str, tensors: Sequence[Tensor], experts: int, shape: tuple[int, int], check: Callable[..., None]
) -> None:
    """Checks that `tensors` are a weight in one of its forms.

    Args:
        name: of the weight.
        tensors: at least one.
        experts: how many; a weight of one expert may be a matrix.
        shape: of one expert's matrix, gate and up rows together.
        check: called with the name and the tensor of each part and the shape it must have.

    Raises:
        ClowderError: "argument".
    """
    rows, columns = shape
    forms = {(1, 3): (experts, rows, columns), (experts, 2): (rows, columns)}
    if name.endswith("w13"):
        forms |= {(2, 3): (experts, rows // 2, columns), (2 * experts, 2): (rows // 2, columns)}
    is_shared = name.startswith("shared")
    if is_shared:
        forms = {form: matrix for form, matrix in forms.items() if form[1] == 2}
    form = (len(tensors), tensors[0].dim())
    if form not in forms and len(tensors) > 1:
        counts = " or ".join(str(count) for count, _ in sorted(forms))
        raise argument_error(name, f"{form[0]} tensors of {form[1]} dimensions", f"{counts} tensors; see clowder.moe")
    whole = shape if is_shared else (experts, *shape)
    for i, tensor in enumerate(tensors):
        check(name if len(tensors) == 1 else f"{name}[{i}]", tensor, forms.get(form, whole))


def is_split(tensors: Sequence[Tensor], intermediate: int) -> bool:
    """Whether the tensors of a w13 hold gate and up rows apart."""
    return bool(tensors) and tensors[0].shape[-2] == intermediate


def table(tensors: Sequence[Tensor], matrices: int, first_byte: int = 0) -> Matrices:
    """Where `matrices` matrices lie: one a tensor, or all in one tensor. Tensors are contiguous, and outlive the table."""
    if not tensors or tensors[0].numel() == 0:
        return Matrices()
    return Matrices([tensor.data_ptr() + first_byte for tensor in tensors], tensors[0].nbytes // matrices)


def gate_and_up_tables(tensors: Sequence[Tensor], matrices: int, split: bool) -> tuple[Matrices, Matrices]:
    """The tables of w1 and of w3 in a w13, whose rows are `split` or one above the other."""
    if split:
        half = len(tensors) // 2
        return table(tensors[:half], matrices), table(tensors[half:], matrices)
    half_bytes = tensors[0].nbytes // (2 * (matrices if len(tensors) == 1 else 1)) if tensors else 0
    return table(tensors, matrices), table(tensors, matrices, half_bytes)


def tables(weights: Sequence[Sequence[Tensor]], split: Sequence[bool], matrices: Sequence[int]) -> list[Matrices]:
    """The tables of w1, w3, w2 and of a shared expert's, in the order of the engine's arguments.

    Args:
        weights: flat w13, w2, shared_w13, shared_w2, or buffers of their gradients.
        split: of w13 and shared_w13, see `is_split`.
        matrices: how many there are of an expert's and of a shared expert's.
    """
    w13, w2, shared_w13, shared_w2 = weights
    routed = (*gate_and_up_tables(w13, matrices[0], split[0]), table(w2, matrices[0]))
    shared = (*gate_and_up_tables(shared_w13, matrices[1], split[1]), table(shared_w2, matrices[1]))
    return [*routed, *shared]


def contiguous(weights: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """By copies where needed."""
    return [[tensor.contiguous() for tensor in weight] for weight in weights]


def empty_like(weight: Sequence[Tensor], dtype: torch.dtype, leading: tuple[int, ...] = ()) -> list[Tensor]:
    """New contiguous tensors in the shapes of a weight's, with `leading` dimensions before them."""
    return [tensor.new_empty((*leading, *tensor.shape), dtype=dtype) for tensor in weight]
