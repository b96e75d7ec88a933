"""Gating: which experts a token goes to, with what weight, and who has to stay out.

Legend: T tokens of this rank, E experts of the whole layer, k choices per token. Choices are laid
out ``[k, T]``: all first choices in token order, then all second ones, and so on. In that order
experts take them, so a first choice is never turned away for somebody's second (GShard,
arXiv:2006.16668, algorithm 1).

Everything here is this rank's own: no number depends on another rank's tokens.
"""

import math
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

JITTER: Final = 1e-2
"""``Jitter`` scales every input of the router by a number in ``[1 - JITTER, 1 + JITTER]``."""
NOISE: Final = ("RSample", "Jitter")
"""The values of ``noisy_gate_policy`` beside None."""


class Routing(NamedTuple):
    """Where this rank's tokens go."""

    expert: Tensor  # [k, T], int64
    weight: Tensor  # [k, T], fp32 or wider; differentiable
    position: Tensor  # [k, T], int64: how many choices of the same expert come before this one
    counts: Tensor  # [E], int64: choices of each expert, those over capacity included
    capacity: int  # choices with position >= capacity are dropped
    load_balancing_loss: Tensor  # scalar, fp32 or wider

    def num_rows(self) -> Tensor:
        """How many rows the fullest expert takes from this rank; scalar, int64."""
        return self.counts.max().clamp(max=self.capacity)

    def slots(self, rows: int) -> Tensor:
        """The row of each choice in a buffer of ``rows`` rows per expert, as ``[k * T]``.

        Dropped choices get row ``E * rows``, one past the end. All other rows differ.
        """
        nowhere = self.counts.numel() * rows
        slots = self.expert * rows + self.position
        return slots.masked_fill(self.position >= self.capacity, nowhere).flatten()


class Router(nn.Linear):
    """Scores of the experts: a linear map without bias, computed in fp32 or wider.

    Weights of a narrower dtype are widened at their use, and autocast does not reach in here,
    because a rounded score sends tokens elsewhere (Switch, arXiv:2101.03961, sec. 2.4).
    """

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__(hidden_size, num_experts, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[T, H]`` -> ``[T, E]``."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(tokens.to(wide), self.weight.to(wide))


def capacity_of(num_tokens: int, num_experts: int, k: int, factor: float, least: int) -> int:
    """How many choices of one rank an expert takes: ``ceil(k * T / E * factor)``.

    At least ``least``; at most T, because no token chooses an expert twice.
    """
    return min(num_tokens, max(least, math.ceil(k * num_tokens / num_experts * factor)))


def jitter(tokens: Tensor) -> Tensor:
    """Scale every element by its own random number near 1 (Switch, sec. 2.4)."""
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return wide * torch.empty_like(wide).uniform_(1 - JITTER, 1 + JITTER)


def gumbel(scores: Tensor) -> Tensor:
    """Gumbel noise: the k largest of scores + noise are k draws without replacement."""
    return -torch.empty_like(scores).exponential_().log()


def route(scores: Tensor, *, k: int, capacity: int, noise: Tensor | None = None) -> Routing:
    """Choose k experts for every token.

    The weight of a choice is the expert's softmax probability, for k > 1 divided by the sum over
    the token's k choices. A choice over capacity counts in that sum: the others are not raised.
    Of equal scores the lower expert number goes first.

    Args:
        scores: ``[T, E]``, fp32 or wider; T may be 0.
        k: experts per token, at most E.
        capacity: see ``Routing``.
        noise: ``[T, E]``, added for the choice alone; weights and loss do not see it.

    Returns:
        The routing. Its load-balancing loss is ``E * sum_e f_e * P_e``: the fraction of first
        choices that fell on e, before any is dropped, and the mean probability of e; it is 1 when
        both are even, and 0 without tokens.
    Source: Switch (arXiv:2101.03961) eq. 4 to 6; for k > 1 GShard (arXiv:2006.16668) sec. 2.2.
    """
    num_tokens, num_experts = scores.shape
    probabilities = scores.softmax(dim=-1)
    ranked = scores.detach() if noise is None else scores.detach() + noise
    chosen = ranked.argsort(dim=-1, descending=True, stable=True)[:, :k]  # [T, k]
    weight = probabilities.gather(1, chosen)
    if k > 1:
        weight = weight / weight.sum(dim=-1, keepdim=True)
    expert = chosen.t().contiguous()
    counts = _count(expert.flatten(), num_experts)
    mean = max(num_tokens, 1)
    fractions = _count(expert[0], num_experts).to(scores.dtype) / mean
    loss = num_experts * (fractions * (probabilities.sum(dim=0) / mean)).sum()
    return Routing(expert, weight.t(), _positions(expert, counts), counts, capacity, loss)


def _count(expert: Tensor, num_experts: int) -> Tensor:
    """How often each number occurs: ``[n]`` -> ``[E]``."""
    numbers = torch.arange(num_experts, device=expert.device)
    return (expert.unsqueeze(1) == numbers).sum(dim=0)


def _positions(expert: Tensor, counts: Tensor) -> Tensor:
    """For each choice the number of earlier ones of the same expert; memory as ``expert``."""
    flat = expert.flatten()
    order = flat.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    sequence = torch.arange(flat.numel(), device=flat.device)
    positions = torch.empty_like(flat)
    positions[order] = sequence - starts[flat[order]]
    return positions.view_as(expert)
