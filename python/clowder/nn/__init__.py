"""Modules: the layer with its router and parameters."""

from .checkpoint import keep_routes
from .moe import MoE
from .router import DeepSeekV3Router, Routes, SoftmaxRouter

__all__ = ["DeepSeekV3Router", "MoE", "Routes", "SoftmaxRouter", "keep_routes"]
