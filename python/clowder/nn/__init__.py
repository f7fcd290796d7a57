"""Modules: the layer with its router and parameters."""

from .moe import MoE
from .router import Routes, SoftmaxRouter

__all__ = ["MoE", "Routes", "SoftmaxRouter"]
