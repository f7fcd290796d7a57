"""Clowder: a deterministic mixture-of-experts training layer with expert parallelism.

A `Workspace` holds the memory and threads of a layer. `moe` is the differentiable call; `forward` and `backward` are the
passes by themselves; `clowder.nn.MoE` is the module with router and parameters. Importing this package touches no GPU.
"""

from . import nn
from .errors import ClowderError, SkippedIdsWarning
from .functional import Gradients, Saved, backward, forward, moe
from .group import VirtualGroup
from .workspace import Schedule, Workspace

__all__ = [
    "ClowderError",
    "Gradients",
    "Saved",
    "Schedule",
    "SkippedIdsWarning",
    "VirtualGroup",
    "Workspace",
    "backward",
    "forward",
    "moe",
    "nn",
]
