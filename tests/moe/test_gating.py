"""Gating against a loop that treats one token after another."""

import math

import pytest
import torch
from torch import Tensor

from onefold.moe.gating import JITTER, Router, Routing, capacity_of, gumbel, jitter, route

ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Sums of at most a few dozen fp64 terms of size 1, taken in another order."""


def scores_of(num_tokens: int, num_experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * num_tokens + num_experts)
    return torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)


def naive(scores: Tensor, k: int) -> Routing:
    """Softmax, choice, weights, positions and loss with plain numbers."""
    num_tokens, num_experts = scores.shape
    expert = torch.zeros(k, num_tokens, dtype=torch.int64)
    weight = torch.zeros(k, num_tokens, dtype=torch.float64)
    firsts, mass = [0] * num_experts, [0.0] * num_experts
    for token, row in enumerate(scores.tolist()):
        total = sum(math.exp(score) for score in row)
        probabilities = [math.exp(score) / total for score in row]
        best = sorted(range(num_experts), key=lambda e: (-row[e], e))[:k]
        chosen = sum(probabilities[e] for e in best) if k > 1 else 1.0
        for choice, e in enumerate(best):
            expert[choice, token] = e
            weight[choice, token] = probabilities[e] / chosen
        firsts[best[0]] += 1
        mass = [m + p for m, p in zip(mass, probabilities, strict=True)]
    counts = [0] * num_experts
    position = torch.zeros_like(expert)
    for choice in range(k):
        for token in range(num_tokens):
            e = int(expert[choice, token])
            position[choice, token] = counts[e]
            counts[e] += 1
    loss = sum(f * m for f, m in zip(firsts, mass, strict=True))
    loss *= num_experts / max(num_tokens, 1) ** 2
    return Routing(
        expert, weight, position, torch.tensor(counts), 0, torch.tensor(loss, dtype=torch.float64)
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 33])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (2, 1), (4, 1), (4, 2), (5, 3), (4, 4)])
def test_as_one_token_after_another(num_tokens: int, num_experts: int, k: int) -> None:
    scores = scores_of(num_tokens, num_experts)
    found, wanted = route(scores, k=k, capacity=3), naive(scores, k)
    assert torch.equal(found.expert, wanted.expert)
    assert torch.equal(found.position, wanted.position)
    assert torch.equal(found.counts, wanted.counts)
    assert found.counts.sum() == k * num_tokens
    torch.testing.assert_close(found.weight, wanted.weight, atol=ROUNDING, rtol=0)
    difference = abs(found.load_balancing_loss - wanted.load_balancing_loss)
    assert difference <= ROUNDING * num_experts


def test_of_equal_scores_the_lower_number_goes_first() -> None:
    found = route(torch.zeros(50, 6), k=3, capacity=50)
    assert torch.equal(found.expert, torch.arange(3).unsqueeze(1).expand(3, 50))
    assert torch.equal(found.position, torch.arange(50).expand(3, 50))


def test_first_choices_are_served_before_second_ones() -> None:
    """Token 1 comes later, but expert 1 is its first choice: token 0's second waits."""
    scores = torch.tensor([[3.0, 2.0, 0.0], [0.0, 3.0, 2.0]])
    found = route(scores, k=2, capacity=1)
    assert found.expert.tolist() == [[0, 1], [1, 2]]
    assert found.position.tolist() == [[0, 0], [1, 0]]
    assert found.slots(rows=1).tolist() == [0, 1, 3, 2]  # row 3 is one past the end


@pytest.mark.parametrize("capacity", [1, 2, 5, 40])
def test_rows_are_used_once(capacity: int) -> None:
    found = route(scores_of(40, 4), k=2, capacity=capacity)
    rows = int(found.num_rows())
    assert rows == min(capacity, int(found.counts.max()))
    slots = found.slots(rows + 1)  # another rank may need more
    kept = slots[slots < 4 * (rows + 1)]
    assert len(set(kept.tolist())) == kept.numel() == int(found.counts.clamp(max=capacity).sum())
    assert torch.equal(kept // (rows + 1), found.expert.flatten()[slots < 4 * (rows + 1)])
    assert slots.max() <= 4 * (rows + 1)
    assert (slots == 4 * (rows + 1)).sum() == 80 - kept.numel()


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k", "factor", "least", "expected"),
    [
        (16, 4, 1, 1.0, 0, 4),
        (17, 4, 1, 1.0, 0, 5),  # rounded up
        (16, 4, 2, 1.0, 0, 8),
        (16, 4, 1, 1.25, 0, 5),
        (16, 8, 1, 1.0, 4, 4),  # at least
        (3, 8, 1, 1.0, 4, 3),  # no token chooses an expert twice
        (16, 4, 4, 2.0, 0, 16),
        (0, 4, 1, 1.0, 4, 0),
    ],
)
def test_capacity(
    num_tokens: int, num_experts: int, k: int, factor: float, least: int, expected: int
) -> None:
    assert capacity_of(num_tokens, num_experts, k, factor, least) == expected


def test_load_balancing_loss() -> None:
    even = torch.eye(4, dtype=torch.float64).repeat(3, 1)
    found = route(even, k=1, capacity=12).load_balancing_loss
    assert abs(found - 1) <= ROUNDING
    crowded = torch.tensor([[50.0, 0, 0, 0]], dtype=torch.float64).repeat(12, 1)
    for capacity in (1, 12):  # what is dropped counts
        found = route(crowded, k=2, capacity=capacity).load_balancing_loss
        assert abs(found - 4) <= 4 * ROUNDING


def test_the_loss_spreads_tokens() -> None:
    """Its gradient lowers the score of the crowded expert and raises the others'."""
    scores = torch.tensor([[1.0, 0, 0]]).repeat(5, 1).requires_grad_()
    route(scores, k=1, capacity=5).load_balancing_loss.backward()
    assert scores.grad is not None
    assert (scores.grad[:, 0] > 0).all()
    assert (scores.grad[:, 1:] < 0).all()


def test_noise_moves_the_choice_alone() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    noise = torch.tensor([[0.0, 0.0, 9.0]], dtype=torch.float64)
    clean, found = route(scores, k=1, capacity=1), route(scores, k=1, capacity=1, noise=noise)
    assert (clean.expert.item(), found.expert.item()) == (0, 2)
    probabilities = scores.softmax(-1)[0]
    assert abs(found.weight.item() - probabilities[2].item()) <= ROUNDING
    # fraction of expert 2 times its own probability, not that of the noisy score
    assert abs(found.load_balancing_loss.item() - 3 * probabilities[2].item()) <= 3 * ROUNDING


def test_gumbel_noise_draws_by_probability() -> None:
    """The share of 20000 draws lies within five standard deviations of the softmax."""
    torch.manual_seed(0)
    scores = torch.tensor([1.0, 0.0, -1.0]).expand(20000, 3)
    found = route(scores, k=1, capacity=20000, noise=gumbel(scores))
    for share, p in zip(
        (found.counts / 20000).tolist(), scores[0].softmax(-1).tolist(), strict=True
    ):
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / 20000)


def test_jitter_stays_close() -> None:
    torch.manual_seed(0)
    tokens = torch.full((100, 7), 2.0, dtype=torch.bfloat16)
    found = jitter(tokens)
    assert found.dtype == torch.float32
    assert found.min() >= 2 * (1 - JITTER)
    assert found.max() <= 2 * (1 + JITTER)
    assert found.max() - found.min() > 3 * JITTER, "almost the whole range is used"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_not_rounded(dtype: torch.dtype) -> None:
    """They are those of an fp32 router with the same values, also under autocast."""
    torch.manual_seed(0)
    router, wide = Router(16, 4).to(dtype), Router(16, 4)
    wide.load_state_dict(router.state_dict())
    tokens = torch.randn(9, 16).to(dtype)
    wanted = wide(tokens.float())
    assert not torch.equal(wanted, wanted.to(dtype).float()), "rounding would show"
    assert torch.equal(router(tokens), wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(wide(tokens.float()), wanted)
    router(tokens).sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.dtype == dtype
