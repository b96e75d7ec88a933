"""What the tests of the layer share: experts, and the layer as a loop over tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onefold.moe import MoE, MoEOutput
from onefold.moe.gating import capacity_of

WIDTH = 5
ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Dot products of at most 16 fp64 terms of size 1, four deep, in another order."""


class Expert(nn.Module):
    """Two maps with biases, so that padding gives something other than zero."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3)
        self.down = nn.Linear(3, width)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(rows)))


def build(
    num_experts: int = 4,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    expert: Callable[[], nn.Module] = Expert,
    **arguments: Any,
) -> MoE:
    """A layer whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    return MoE(WIDTH, expert, num_experts, **arguments).to(dtype)


def one_by_one(layer: MoE, hidden: Tensor) -> MoEOutput:
    """The whole layer in one process, one token after another."""
    experts = list(layer.experts.experts.values())  # type: ignore[operator]
    flat = hidden.reshape(-1, hidden.shape[-1])
    probabilities = (flat @ layer.gate.weight.t()).softmax(-1)
    capacity = len(flat)
    if layer.drop_tokens:
        factor = layer.capacity_factor if layer.training else layer.eval_capacity_factor
        capacity = capacity_of(len(flat), len(experts), layer.k, factor, layer.min_capacity)
    chosen = [p.topk(layer.k).indices.tolist() for p in probabilities]
    outputs = [torch.zeros_like(token) for token in flat]
    counts = [0] * len(experts)
    firsts = [0.0] * len(experts)
    for choice in range(layer.k):
        for index, token in enumerate(flat):
            e = chosen[index][choice]
            firsts[e] += choice == 0
            if counts[e] < capacity:
                weight = probabilities[index][e]
                if layer.k > 1:
                    weight = weight / probabilities[index][chosen[index]].sum()
                outputs[index] = outputs[index] + weight * experts[e](token)
            counts[e] += 1
    num_tokens = max(1, len(flat))
    fractions = torch.tensor(firsts, dtype=probabilities.dtype) / num_tokens
    loss = len(experts) * (fractions * probabilities.sum(0) / num_tokens).sum()
    output = torch.stack(outputs).view_as(hidden) if outputs else hidden * 1
    return MoEOutput(output, loss, torch.tensor(counts))


def loss_of(found: MoEOutput, target: Tensor, factor: float = 0.125) -> Tensor:
    """The mean over the rank's own tokens, with a share of the load-balancing loss."""
    error = (found.output - target).square().sum() / max(1, target.numel())
    return error + factor * found.load_balancing_loss


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    """By name; every parameter must have one."""
    named = {name: param.grad for name, param in layer.named_parameters()}
    missing = [name for name, grad in named.items() if grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: grad.clone() for name, grad in named.items() if grad is not None}


def assert_close(found: Tensor, wanted: Tensor, what: str, rounding: float = ROUNDING) -> None:
    """Equal up to ``rounding`` of numbers of size 1."""
    torch.testing.assert_close(
        found, wanted, atol=rounding, rtol=rounding, msg=lambda text: f"{what}: {text}"
    )


def assert_equal(
    found: dict[str, Tensor], wanted: dict[str, Tensor], without: Sequence[str] = ()
) -> None:
    """The same names and the same bits."""
    assert found.keys() == wanted.keys() - set(without)
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), f"{name}: {tensor}, expected {wanted[name]}"
