"""The matrix's model: layers of small integers, and the options that features turn on.

Weights and inputs are -1, 0 or 1, so that activations, gradients and their sums over all
ranks and backwards are integers that bf16 and fp16 hold exactly (``test_matrix`` checks it). With
``real=True`` both are real numbers. Data are different on every rank and backward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onefold.experts import ExpertParallel, NumberedExperts

WIDTH = 4
RANK = 2
BATCH = 2


@dataclass(frozen=True, slots=True)
class Options:
    """What kind of model; frozen, so that references can be kept by it."""

    dtype: str = "float32"
    real: bool = False
    adapters: bool = False
    """Blocks are frozen but for two small matrices beside each of their weights."""
    tied: bool = False
    """The last layer's weight is the first block's, in another unit."""
    checkpoint: str = ""
    """"reentrant", "saved" (not reentrant) or none: of every block."""
    compiled: bool = False
    """Every block by torch.compile with aot_eager."""
    experts: int = 0
    """Ranks that two experts, one for each row, are spread over; none for a model without."""

    @property
    def depth(self) -> int:
        """Layers on the longest way from the input to the loss."""
        return (6 if self.adapters else 4) + min(1, self.experts)

    def plain(self) -> "Options":
        """The same gradients in fp64, by nothing but autograd."""
        return Options("float64", self.real, self.adapters, self.tied, experts=min(1, self.experts))


class Block(nn.Module):
    """A layer of ``[B, WIDTH] -> [B, WIDTH]``, with ReLU."""

    def __init__(self, adapters: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.adapter: nn.Sequential | None = None
        if adapters:
            self.layer.requires_grad_(False)
            down, up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
            self.adapter = nn.Sequential(down, up)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.layer(hidden)
        if self.adapter is not None:
            out = out + self.adapter(hidden)
        return out.relu()


class Scale(nn.Module):
    """An expert: ``[rows, WIDTH]`` times a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.own


class Experts(nn.Module):
    """Row e of ``[BATCH, WIDTH]`` goes to expert e, on whichever rank it is, and comes back."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.parallel = ExpertParallel(NumberedExperts(Scale() for _ in range(BATCH)), size=ranks)

    def forward(self, hidden: Tensor) -> Tensor:
        exchange, here = self.parallel.all_to_all, BATCH // self.parallel.size
        sent = exchange.exchange(hidden).view(-1, here, WIDTH).transpose(0, 1)
        out = self.parallel(sent).transpose(0, 1).reshape(BATCH, WIDTH)
        back: Tensor = exchange.exchange(out)
        return back


class Model(nn.Module):
    """A layer, two blocks, experts if asked for, a layer; ``[B, WIDTH]`` -> a sum."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(options.adapters) for _ in range(2))
        if options.experts:
            self.blocks.append(Experts(options.experts))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if options.tied:
            self.last.weight = self.blocks[0].layer.weight  # type: ignore[union-attr, assignment]
        self._checkpoint = options.checkpoint
        self.to(getattr(torch, options.dtype))
        _fill(self, options.real)
        if options.compiled:
            for block in self.blocks:
                if isinstance(block, Block):
                    block.compile(backend="aot_eager")

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.to(self.first.weight.dtype))
        for block in self.blocks:
            if self._checkpoint:
                reentrant = self._checkpoint == "reentrant"
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            else:
                hidden = block(hidden)
        total: Tensor = self.last(hidden).sum()
        return total


def _fill(model: nn.Module, real: bool) -> None:
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(_numbers(param.size(), -1, 2, real, generator))


def _numbers(
    size: torch.Size, low: int, high: int, real: bool, generator: torch.Generator
) -> Tensor:
    """Integers from ``low`` below ``high``, or real numbers in the same range."""
    if not real:
        return torch.randint(low, high, size, generator=generator, dtype=torch.float64)
    return torch.rand(size, generator=generator, dtype=torch.float64) * (high - 1 - low) + low


def inputs(rank: int, backward: int, real: bool) -> Tensor:
    """``[B, WIDTH]`` in fp64."""
    generator = torch.Generator().manual_seed(1_000 * rank + backward)
    return _numbers(torch.Size((BATCH, WIDTH)), -1, 2, real, generator)


SEED = 268
"""Of the weights: small sums, and gradients that differ between any two backwards."""
