"""Memory grows with rows plus columns: nothing of the matrix's size is made or saved."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onefold.contrastive import InfoNCE, SigLIP
from tests.contrastive.reference import embeddings, info_nce, siglip

BATCH = 256
WIDTH = 4
TILE = 32
COLUMNS = {"hard negatives": 3}
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "InfoNCE": lambda: InfoNCE(tile=TILE),
    "symmetric": lambda: InfoNCE(symmetric=True, learnable_scale=True, tile=TILE),
    "hard negatives": lambda: InfoNCE(tile=TILE),
    "SigLIP": lambda: SigLIP(tile=TILE),
}


class Allocations(TorchDispatchMode):
    """Follows every storage that an operation makes, inside of autograd functions too."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        before = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage(), before)
        return result

    def _follow(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in before or key in self._known:
            return
        self._known.add(key)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.largest_bytes = max(self.largest_bytes, num_bytes)
        weakref.finalize(storage, self._freed, key, num_bytes)

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= num_bytes


def measured(loss: Callable[..., Tensor], batch: int, columns: int = 2) -> Allocations:
    """A forward and a backward."""
    inputs = embeddings(batch, WIDTH, columns, dtype=torch.float32)
    with Allocations() as allocations:
        loss(*inputs).backward()
    return allocations


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_memory_grows_with_rows_plus_columns(name: str, masked: bool) -> None:
    columns = COLUMNS.get(name, 2)
    loss = LOSSES[name]()

    def call(*inputs: Tensor) -> Tensor:
        ids = torch.arange(len(inputs[0])) % 100 if masked else None
        return loss(*inputs, ids=ids)

    once, twice = (measured(call, batch, columns) for batch in (BATCH, 2 * BATCH))
    # The largest is a tile, or the embeddings of a column.
    assert twice.largest_bytes == 4 * max(2 * BATCH * WIDTH, TILE * TILE)
    # The peak is a few copies of the embeddings, and tiles whose size does not depend on B.
    assert twice.peak_bytes < 2 * once.peak_bytes
    assert twice.peak_bytes < 4 * (2 * BATCH * (WIDTH * 5 * columns + 8) + 8 * TILE * TILE)
    assert twice.peak_bytes < 4 * (2 * BATCH) ** 2 / 4


@pytest.mark.parametrize("full", [info_nce, siglip])
def test_the_full_matrix_is_seen(full: Callable[..., Tensor]) -> None:
    """The control."""
    once, twice = (measured(lambda *c: full(c), batch) for batch in (BATCH, 2 * BATCH))
    assert twice.largest_bytes == 4 * (2 * BATCH) ** 2
    assert twice.peak_bytes > 3.5 * once.peak_bytes


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_saved_for_backward(name: str) -> None:
    """Beside embeddings, normalised or not, three numbers per row and direction."""
    columns = COLUMNS.get(name, 2)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.numel()
        return tensor

    inputs = embeddings(BATCH, WIDTH, columns, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = LOSSES[name]()(*inputs)
    assert max(saved.values()) == BATCH * WIDTH
    # Columns as given and normalised, their norms expanded or not and clamped, and those three.
    assert sum(saved.values()) <= BATCH * (columns * (3 * WIDTH + 2) + 6) + 16
    loss.backward()
