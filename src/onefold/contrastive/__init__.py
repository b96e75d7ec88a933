"""Contrastive training: GradCache, and losses whose similarity matrix never exists whole."""

from onefold.contrastive.grad_cache import GradCache
from onefold.contrastive.losses import TILE, ContrastiveLoss, InfoNCE, SigLIP
from onefold.contrastive.tiles import FalseNegatives

__all__ = ["TILE", "ContrastiveLoss", "FalseNegatives", "GradCache", "InfoNCE", "SigLIP"]
