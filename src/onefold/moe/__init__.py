"""Mixture of experts: a layer whose experts lie on different ranks."""

from onefold.moe.layer import MoE, MoEOutput

__all__ = ["MoE", "MoEOutput"]
