"""MoE: a mixture-of-experts layer whose experts lie on the ranks of one mesh axis.

Legend: T tokens of this rank, H hidden size, E experts, W = ``ep_size`` ranks on the axis, R rows
that this forward reserves for each expert and rank.

    [T, H] -gate-> [E, R, H] -exchange-> [E/W, W * R, H] -experts-> -exchange back-> [T, H]

A token is copied into one row per choice and gathered from there: nothing of size tokens x experts
x capacity is built, and no two choices write one row, so forward and backward give the same bits
every time.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from onefold.experts import ExpertParallel, NumberedExperts
from onefold.moe.gating import NOISE, Router, Routing, capacity_of, gumbel, jitter, route
from onefold.wire.all_to_all import AllToAll


class MoEOutput(NamedTuple):
    """What the layer returns."""

    output: Tensor
    """The shape and dtype of the input."""
    load_balancing_loss: Tensor
    """Scalar, fp32 or wider, of this rank's tokens; add it to the loss, times a small factor."""
    expert_counts: Tensor
    """``[E]``, int64: this rank's choices of each expert, those that were dropped included."""


class MoE(nn.Module):
    """Every token goes through k of ``num_experts`` experts, which share the ranks of an axis.

    The layer runs with ``ep_size`` 1 as it is; with more ranks it must be part of a model that went
    through ``onefold.initialize``, which leaves ``num_experts / ep_size`` experts on each rank.
    Every rank builds all experts, with the same random numbers whatever ``ep_size`` is.

    The experts' parameters are expert-parallel (see ``onefold.experts``), the router's are not.
    Other ranks wait for this one's rows, so all ranks of the axis call the layer equally often, in
    forward and in backward. They may have different numbers of tokens, none at all included: which
    tokens are dropped depends on a rank's own tokens alone, and R is agreed on.

    Args:
        hidden_size: H.
        expert: makes an expert, a module that maps ``[rows, H]`` to ``[rows, H]``, row by row; it
            is called ``num_experts`` times. Rows without a token are zeros, and their gradient is
            zero, so at zero an expert's derivative must be finite.
        num_experts: E.
        ep_size: W, a divisor of E.
        k: experts per token.
        capacity_factor: an expert takes ``ceil(k * T / E * capacity_factor)`` choices from each
            rank while training. The rest are dropped: they add zero to the output.
        eval_capacity_factor: the same in ``eval()``.
        min_capacity: but at least so many.
        drop_tokens: False lifts the limit. R is what the fullest expert needs, not T.
        noisy_gate_policy: while training: ``RSample`` adds Gumbel noise to the scores for the
            choice, ``Jitter`` scales the router's input by 1 +- 0.01; None does neither.

    Attributes:
        gate: the router; its weight is ``[E, H]``.
        experts: the ``ExpertParallel`` of the experts.

    Raises:
        ValueError: an argument is out of its range.
    Source: GShard (arXiv:2006.16668), Switch (arXiv:2101.03961); the arguments and the three
        results are those of DeepSpeed's ``deepspeed.moe.layer.MoE``, whose ``expert`` is a module.
    """

    def __init__(  # noqa: PLR0913 (DeepSpeed's signature)
        self,
        hidden_size: int,
        expert: Callable[[], nn.Module],
        num_experts: int,
        *,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        drop_tokens: bool = True,
        noisy_gate_policy: str | None = None,
    ) -> None:
        super().__init__()
        _check_whole(hidden_size=hidden_size, num_experts=num_experts, ep_size=ep_size)
        _check_factors(capacity_factor=capacity_factor, eval_capacity_factor=eval_capacity_factor)
        if not 1 <= k <= num_experts:
            raise ValueError(f"MoE(k=): expected 1 to {num_experts} experts per token, got {k}.")
        if min_capacity < 0:
            raise ValueError(f"MoE(min_capacity=): expected at least 0, got {min_capacity}.")
        if num_experts % ep_size:
            raise ValueError(
                f"MoE(ep_size=): expected a divisor of num_experts={num_experts}, because every "
                f"rank holds equally many, got {ep_size}."
            )
        if noisy_gate_policy not in (None, *NOISE):
            raise ValueError(
                f"MoE(noisy_gate_policy=): expected one of {NOISE} or None, got "
                f"{noisy_gate_policy!r}."
            )
        if isinstance(expert, nn.Module):
            raise ValueError(
                f"MoE(expert=): expected a callable that makes a new expert, got the module "
                f"{type(expert).__name__}; copies of one would all start alike. Pass "
                "'lambda: YourExpert(...)'."
            )
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.drop_tokens = drop_tokens
        self.noisy_gate_policy = noisy_gate_policy
        self.gate = Router(hidden_size, num_experts)
        built = NumberedExperts(expert() for _ in range(num_experts))
        self.experts = ExpertParallel(built, size=ep_size)

    def forward(self, hidden: Tensor) -> MoEOutput:
        """Send every token through its experts.

        Args:
            hidden: ``[..., H]``.

        Returns:
            Output, load-balancing loss and counts; see ``MoEOutput``.

        Raises:
            ValueError: the last dim is not H.
            StateError: ``ep_size`` is above 1 and the layer is not under an engine.
        Communication: three all-to-alls over the axis, of 8 bytes per rank to agree on R and twice
            ``[E, R, H]``; in backward two, one if ``hidden`` needs no gradient. None for W = 1.
        Memory: the experts' input ``[E, R, H]`` and ``[k * T, H]`` until backward, beside what the
            experts keep; for a moment three times that.
        """
        if hidden.dim() == 0 or hidden.shape[-1] != self.hidden_size:
            raise ValueError(
                f"MoE: expected hidden states [..., {self.hidden_size}], got shape "
                f"{tuple(hidden.shape)}."
            )
        axis = self.experts.all_to_all
        tokens = hidden.reshape(-1, self.hidden_size)
        routing = self._route(tokens)
        rows = _agreed_rows(routing, axis)
        slots = routing.slots(rows)
        sent = _dispatch(tokens, slots, self.k, self.num_experts * rows)
        arrived = _by_expert(axis.exchange(sent), axis.size, rows)
        returned = axis.exchange(_by_rank(self.experts(arrived), axis.size, rows))
        output = _combine(returned, slots, routing.weight).to(hidden.dtype)
        return MoEOutput(output.view_as(hidden), routing.load_balancing_loss, routing.counts)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows beside the modules."""
        return f"num_experts={self.num_experts}, k={self.k}, drop_tokens={self.drop_tokens}"

    def _route(self, tokens: Tensor) -> Routing:
        policy = self.noisy_gate_policy if self.training else None
        scores = self.gate(jitter(tokens) if policy == "Jitter" else tokens)
        noise = gumbel(scores) if policy == "RSample" else None
        capacity = num_tokens = tokens.shape[0]
        if self.drop_tokens:
            factor = self.capacity_factor if self.training else self.eval_capacity_factor
            capacity = capacity_of(num_tokens, self.num_experts, self.k, factor, self.min_capacity)
        return route(scores, k=self.k, capacity=capacity, noise=noise)


def _agreed_rows(routing: Routing, axis: AllToAll) -> int:
    """R: the most rows that any rank of the axis has for one expert, and at least one."""
    needed = routing.num_rows().expand(axis.size)
    return max(1, int(axis.exchange(needed).max()))


def _dispatch(tokens: Tensor, slots: Tensor, k: int, num_rows: int) -> Tensor:
    """``[T, H]`` -> ``[E * R, H]``: each choice's token in its row, zeros elsewhere."""
    rows = tokens.new_zeros(num_rows + 1, tokens.shape[-1])
    # the row past the end takes the dropped ones and is cut off
    return rows.index_copy(0, slots, tokens.repeat(k, 1))[:num_rows]


def _by_expert(arrived: Tensor, size: int, rows: int) -> Tensor:
    """``[W * E/W * R, H]``, by rank and expert -> ``[E/W, W * R, H]``."""
    by_rank = arrived.view(size, -1, rows, arrived.shape[-1])
    return by_rank.transpose(0, 1).flatten(1, 2)


def _by_rank(done: Tensor, size: int, rows: int) -> Tensor:
    """``[E/W, W * R, H]`` -> ``[W * E/W * R, H]``: the way back of ``_by_expert``."""
    by_expert = done.view(-1, size, rows, done.shape[-1])
    return by_expert.transpose(0, 1).flatten(0, 2)


def _combine(returned: Tensor, slots: Tensor, weight: Tensor) -> Tensor:
    """``[E * R, H]`` -> ``[T, H]``: the weighted sum of each token's choices, in fp32 or wider."""
    hidden_size = returned.shape[-1]
    # the row past the end is what a dropped choice gets: zeros
    choices = F.pad(returned, (0, 0, 0, 1)).index_select(0, slots)
    return (choices.view(*weight.shape, hidden_size) * weight.unsqueeze(-1)).sum(dim=0)


def _check_whole(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"MoE({name}=): expected at least 1, got {value}.")


def _check_factors(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"MoE({name}=): expected a finite number above 0, got {value}.")
