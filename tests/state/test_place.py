"""The place in the data: a resumed run gets the samples that the undisturbed one would have got."""

import logging
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import onefold
from tests.harness import RankContext, pool_for
from tests.rig import STAGES


class Numbers(Dataset[Tensor]):
    """Sample k is k."""

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def __len__(self) -> int:
        return self.numel

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Net(nn.Module):
    """Dropout, so that a random number drawn too many would be seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.ones(6))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.dropout(self.w) * x[:, None]).mean()


def setup(ctx: RankContext, stage: int, data: Any) -> tuple[onefold.Engine, Any]:
    net = Net()
    engine, _, loader, _ = onefold.initialize(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}},
        training_data=data,
    )
    ctx.cleanup(engine.destroy)
    return engine, loader


def train(engine: onefold.Engine, batch: Tensor) -> list[float]:
    engine.backward(engine(batch))
    engine.step()
    return batch.tolist()


def undisturbed(ctx: RankContext, stage: int, folder: str, numel: int, k: int) -> Any:
    """Saves after micro batch k, or after the loop over the epoch that ends there (-k)."""
    engine, loader = setup(ctx, stage, Numbers(numel))
    torch.manual_seed(ctx.rank)
    seen = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            seen.append(train(engine, batch))
            if len(seen) == k:
                engine.save_checkpoint(folder, client_state={"epoch": epoch})
        if len(seen) == -k:
            engine.save_checkpoint(folder, client_state={"epoch": epoch + 1})
    return seen, engine.full_state_dict()["w"].tolist()


def resumed(ctx: RankContext, stage: int, folder: str, numel: int) -> Any:
    engine, loader = setup(ctx, stage, Numbers(numel))
    seen = []
    _, client_state = engine.load_checkpoint(folder)
    for epoch in range(client_state["epoch"], 3):
        loader.sampler.set_epoch(epoch)
        seen += [train(engine, batch) for batch in loader]
    return seen, engine.full_state_dict()["w"].tolist()


@pytest.mark.parametrize("k", [1, 4, 5, -5, 11])
@pytest.mark.parametrize("stage", STAGES)
def test_resumed_in_the_middle_of_an_epoch(tmp_path: Path, stage: int, k: int) -> None:
    """19 samples on 2 ranks: 5 micro batches an epoch, the last one of 2."""
    arguments = {"stage": stage, "folder": str(tmp_path), "numel": 19}
    straight = pool_for(2).run(undisturbed, **arguments, k=k)
    found = pool_for(2).run(resumed, **arguments)
    for (seen, weights), (all_seen, wanted) in zip(found, straight, strict=True):
        assert seen == all_seen[abs(k) :]
        assert weights == wanted
    first = [x for seen, _ in straight for batch in seen[:5] for x in batch]
    assert set(first) == {float(x) for x in range(19)}
    assert len(first) == 20


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 2), (3, 4)])
def test_another_world_size_goes_on_with_the_rest(tmp_path: Path, before: int, after: int) -> None:
    arguments = {"stage": 1, "folder": str(tmp_path), "numel": 48}
    straight = pool_for(before).run(undisturbed, **arguments, k=3)
    first = {x for seen, _ in straight for batch in seen[:3] for x in batch}
    found = pool_for(after).run(resumed, **arguments)
    steps = ceil((48 - len(first)) / after / 2)
    rest = [x for seen, _ in found for batch in seen[:steps] for x in batch]
    assert first | set(rest) == {float(x) for x in range(48)}
    again = len(rest) - len(set(rest) - first)
    assert again == -(48 - len(first)) % after  # the last round is filled with the first ones


class Stream(IterableDataset[Tensor]):
    """A dataset with a place of its own, in a worker process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 40:
            self.at += 1
            yield torch.tensor(100.0 * self.rank + self.at)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def own_loader(ctx: RankContext, folder: str, workers: int) -> Any:
    loader = StatefulDataLoader(Stream(ctx.rank), batch_size=2, num_workers=workers)
    engine, returned = setup(ctx, 2, loader)
    assert returned is loader
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    engine.save_checkpoint(folder)
    wanted = [batch.tolist() for batch in iterator]
    other, fresh = setup(
        ctx, 3, StatefulDataLoader(Stream(ctx.rank), batch_size=2, num_workers=workers)
    )
    other.load_checkpoint(folder)
    assert [batch.tolist() for batch in fresh] == wanted
    assert wanted[0][0] == 100 * ctx.rank + 9
    return None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_of_the_users_own(tmp_path: Path, workers: int) -> None:
    pool_for(2).run(own_loader, folder=str(tmp_path), workers=workers)


def elsewhere(ctx: RankContext, folder: str) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onefold.state.loader")
    logger.addHandler(handler)
    engine, _ = setup(ctx, 2, StatefulDataLoader(Stream(ctx.rank), batch_size=2))
    engine.load_checkpoint(folder)
    logger.removeHandler(handler)
    return texts


def test_a_place_that_means_nothing_here_is_said(tmp_path: Path) -> None:
    pool_for(2).run(own_loader, folder=str(tmp_path), workers=0)
    ((text,),) = pool_for(1).run(elsewhere, folder=str(tmp_path))
    assert "place is not restored" in text
    assert "2 ranks" in text


def refused(ctx: RankContext) -> None:
    with pytest.raises((ValueError, onefold.RankMismatchError), match="StatefulDataLoader"):
        setup(ctx, 1, DataLoader(Numbers(4)))


def test_a_loader_without_a_place_is_refused() -> None:
    pool_for(2).run(refused)
