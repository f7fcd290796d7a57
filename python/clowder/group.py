"""Expert-parallel groups as Python sees them."""

from __future__ import annotations

import operator

from .errors import argument_error


class VirtualGroup:
    """`ranks` expert-parallel ranks inside this process: the full cross-rank protocol in one launch.

    Tensors hold the ranks' tokens one after the other, and weights are the global ones: rank r owns the experts
    r * E / R to (r + 1) * E / R - 1. Results do not depend on `ranks`, bit for bit, except a shared expert's weight
    gradients (each rank's own tokens are summed first).

    Args:
        ranks: the number of ranks, at least 1.

    Raises:
        ClowderError: "argument" if `ranks` is no positive integer.
    """

    def __init__(self, ranks: int) -> None:
        try:
            self.ranks = operator.index(ranks)
        except TypeError:
            raise argument_error("ranks", repr(ranks), "an integer") from None
        if self.ranks < 1:
            raise argument_error("ranks", self.ranks, "at least 1")

    def __repr__(self) -> str:
        return f"VirtualGroup({self.ranks})"
