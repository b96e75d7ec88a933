"""Dataloader: this rank's micro batches, from a place that a checkpoint can hold."""

import math
from collections.abc import Iterator, Sequence, Sized
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

_EPOCH: Final = "epoch"
_CONSUMED: Final = "consumed"


class ResumableSampler(DistributedSampler[Any]):
    """Every W-th index of one shuffled order, from any place on, at any W.

    Its state speaks of all ranks together (epoch, and how many of the epoch's indices have been
    given out), so a run goes on where another one was, at other world sizes too: no sample of the
    epoch is skipped, and none is given out twice but the few that fill the last round.

    Source: ``torch.utils.data.DistributedSampler``, whose ``set_epoch`` it keeps.
    """

    def __init__(self, dataset: Sized, *, num_replicas: int, rank: int, seed: int = 0) -> None:
        super().__init__(dataset, num_replicas, rank, seed=seed)  # type: ignore[arg-type]
        self._numel = len(dataset)
        self._consumed = 0
        self._begin = 0  # of the next iteration
        self._is_chosen = False  # the epoch, by the caller, since the last resume

    def __iter__(self) -> Iterator[int]:
        """The rest of the epoch."""
        begin, self._begin = self._begin, 0
        self._consumed = begin
        return self._indices(begin)

    def _indices(self, begin: int) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._numel, generator=generator).tolist()
        for first in range(begin, self._numel, self.num_replicas):
            self._consumed = min(first + self.num_replicas, self._numel)
            yield order[(first + self.rank) % self._numel]  # past the end: the first ones again

    def __len__(self) -> int:
        """How many indices of a whole epoch this rank gets."""
        return math.ceil(self._numel / self.num_replicas)

    def state_dict(self) -> dict[str, int]:
        """The place in the data, alike on all ranks that have given out equally many."""
        return {_EPOCH: self.epoch, _CONSUMED: self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration at that place; in another epoch, if one was chosen, at 0.

        The loader calls it when the next iteration begins.
        """
        if self._is_chosen and self.epoch != state[_EPOCH]:
            return
        self.epoch = state[_EPOCH]
        self._begin = self._consumed = state[_CONSUMED]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iterations."""
        super().set_epoch(epoch)
        self._is_chosen = True

    def resume(self) -> None:
        """A state is about to be loaded; an epoch that was chosen before says nothing now."""
        self._begin, self._is_chosen = 0, False


def build_dataloader(
    data: "Dataset[Any]", micro_batch_size: int, rank: int, size: int
) -> "StatefulDataLoader[Any]":
    """A loader of rank ``rank``'s micro batches, shuffled; ``sampler.set_epoch`` as usual.

    The last micro batch of an epoch may be smaller, on all ranks alike.
    """
    sampler = ResumableSampler(data, num_replicas=size, rank=rank)  # type: ignore[arg-type]
    # With a generator of its own, so that iterating draws no random number from the model's.
    return StatefulDataLoader(
        data, batch_size=micro_batch_size, sampler=sampler, generator=torch.Generator()
    )


def check_dataloader(loader: "DataLoader[Any]") -> "StatefulDataLoader[Any]":
    """A loader that the user built.

    Raises:
        ValueError: it cannot say where it is.
    """
    if isinstance(loader, StatefulDataLoader):
        return loader
    raise ValueError(
        f"initialize(training_data=): expected a dataset or a torchdata StatefulDataLoader, got "
        f"{type(loader).__name__}, whose place in the data no checkpoint can hold. Build a "
        "StatefulDataLoader with the same arguments, or keep the loader to yourself."
    )


def restore(loader: "StatefulDataLoader[Any]", states: Sequence[Any], rank: int, size: int) -> bool:
    """Take up the place in the data.

    Args:
        loader: this rank's.
        states: by rank, of the loaders that were saved.
        rank: this rank.
        size: how many ranks there are now.

    Returns:
        Whether the states of that many ranks mean anything to this loader.
    """
    if isinstance(loader.sampler, ResumableSampler):
        loader.sampler.resume()
    elif len(states) != size:
        return False
    loader.load_state_dict(states[rank % len(states)])
    return True
