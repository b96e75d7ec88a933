"""Workloads: models, data and losses. No dropout; every rank has data of its own.

A workload says how a step's losses come about, an engine says what happens around them.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_SEED = 20260101
LossOf = Callable[[], Tensor]


class Workload(Protocol):
    """One model and its data on every rank."""

    @property
    def learning_rate(self) -> float:
        """AdamW's."""

    @property
    def gathers_per_backward(self) -> int:
        """Uses of the parameters for each backward; GradCache also encodes without gradients."""

    def model(self) -> nn.Module:
        """The same on every rank."""

    def block_classes(self, model: nn.Module) -> list[type[nn.Module]]:
        """Classes of the blocks that are sharded as a whole."""

    def prepare(self, rank: int, num_backwards: int) -> None:
        """Load data, and the modules that this takes, once per process."""

    def num_outermost(self, num_backwards: int) -> int:
        """How many of the backwards the caller runs; the others are nested in these."""

    def losses(
        self, model: nn.Module, rank: int, num_backwards: int, dtype: torch.dtype
    ) -> Iterator[LossOf]:
        """What the caller runs ``backward`` of, one after another; the sum is the step's loss."""


class _Layer(nn.TransformerEncoderLayer):
    def __init__(self, width: int) -> None:
        heads = width // 64
        super().__init__(width, heads, 4 * width, dropout=0.0, batch_first=True)


class _Encoder(nn.Module):
    """Repeated blocks, one after another."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class _SmallTensors(nn.Module):
    """Eight linear layers of 64 to 64, with biases: 16 tensors of 33,280 elements in all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, hidden: Tensor) -> Tensor:
        for linear in self.linears:
            hidden = hidden + torch.tanh(linear(hidden)) / 8
        return hidden


@dataclass(frozen=True)
class Regression:
    """A stack of equal blocks that maps noise to noise.

    Args:
        block: makes one from the width.
        num_blocks: how many.
        width: of the rows.
        tokens: rows of one microbatch.
    """

    block: Callable[[int], nn.Module]
    num_blocks: int
    width: int
    tokens: int
    learning_rate: float = 1e-4
    gathers_per_backward: int = 2

    def model(self) -> nn.Module:
        torch.manual_seed(_SEED)
        return _Encoder([self.block(self.width) for _ in range(self.num_blocks)])

    def block_classes(self, model: nn.Module) -> list[type[nn.Module]]:
        assert isinstance(model, _Encoder)
        return [type(model.layers[0])]

    def prepare(self, rank: int, num_backwards: int) -> None:
        pass  # a few kilobytes

    def num_outermost(self, num_backwards: int) -> int:
        return num_backwards

    def losses(
        self, model: nn.Module, rank: int, num_backwards: int, dtype: torch.dtype
    ) -> Iterator[LossOf]:
        for k in range(num_backwards):
            rows, wanted = self._microbatch(rank, k, dtype)

            def loss_of(rows: Tensor = rows, wanted: Tensor = wanted) -> Tensor:
                found: Tensor = model(rows).float()
                return (found - wanted).square().mean() / num_backwards

            yield loss_of

    @functools.cache  # noqa: B019 (workloads live as long as the process)
    def _microbatch(self, rank: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``[1, T, width]`` each."""
        generator = torch.Generator().manual_seed(_SEED + 1000 * rank + k)
        rows, wanted = torch.randn(2, 1, self.tokens, self.width, generator=generator)
        return rows.to(dtype), wanted


@dataclass(frozen=True)
class MiniLM:
    """The demo's step: sentence-transformers' cached loss, whose backwards are nested in one.

    The texts are the demo's, tokenised beforehand; n backwards are n / 2 mini-batches of a column.
    """

    mini_batch_size: int = 8
    max_tokens: int = 64
    learning_rate: float = 5e-5
    gathers_per_backward: int = 3

    def model(self) -> nn.Module:
        from onefold.cli import model as models

        models.require_extras(models.DEFAULT_MODEL)
        model = models.load(models.find_model(models.DEFAULT_MODEL), self.max_tokens)
        assert isinstance(model, nn.Module)
        return model.eval()  # no dropout; gradients are the same business

    def block_classes(self, model: nn.Module) -> list[type[nn.Module]]:
        from onefold.cli.model import block_classes

        names = block_classes(model)
        classes = {type(module) for module in model.modules() if type(module).__name__ in names}
        return sorted(classes, key=lambda one: one.__name__)

    def prepare(self, rank: int, num_backwards: int) -> None:
        self._features(rank, self._num_pairs(num_backwards))

    def num_outermost(self, num_backwards: int) -> int:
        return 1

    def _num_pairs(self, num_backwards: int) -> int:
        if num_backwards % 2:
            raise ValueError(f"minilm: expected an even number of backwards, got {num_backwards}.")
        return num_backwards // 2 * self.mini_batch_size

    def losses(
        self, model: nn.Module, rank: int, num_backwards: int, dtype: torch.dtype
    ) -> Iterator[LossOf]:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import (
            CachedMultipleNegativesRankingLoss,
        )

        # As its trainer does it: made for the model, then run through what wraps it.
        bare: Any = model if isinstance(model, SentenceTransformer) else model.module
        loss = CachedMultipleNegativesRankingLoss(bare, mini_batch_size=self.mini_batch_size)
        loss.model = model
        features = self._features(rank, self._num_pairs(num_backwards))
        # The loss is a leaf with a hook; times one, since DeepSpeed refuses leaves.
        yield lambda: loss([dict(column) for column in features], None) * 1.0

    @functools.cache  # noqa: B019
    def _features(self, rank: int, num_pairs: int) -> list[dict[str, Any]]:
        from onefold.cli.pairs import split, take

        pairs = split(_pairs()).train
        batch = take(pairs, step=rank, rank=0, num_ranks=1, batch_size=num_pairs)
        tokenizer: Any = self.model()
        return [tokenizer.preprocess(list(texts)) for texts in zip(*batch, strict=True)]


@functools.cache
def _pairs() -> list[Any]:
    from onefold.cli.pairs import standard_library

    return list(standard_library())


WORKLOADS: dict[str, Workload] = {
    "25m": Regression(_Layer, num_blocks=8, width=512, tokens=32),
    "77m": Regression(_Layer, num_blocks=6, width=1024, tokens=8),
    "minilm": MiniLM(),
    "800": Regression(_SmallTensors, num_blocks=50, width=64, tokens=8, learning_rate=1e-3),
    "tiny": Regression(_SmallTensors, num_blocks=2, width=64, tokens=4, learning_rate=1e-3),
}
"""``tiny`` is for the benchmarks' own tests."""
