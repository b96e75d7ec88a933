"""Savers: each saves and loads one engine as that engine's users do."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from benchmarks.checkpoints.cell import Way
from benchmarks.engines import Engine
from benchmarks.own import Onefold
from benchmarks.peers import DeepSpeed, Fsdp2
from onefold.state.folder import LATEST


class Saver(ABC):
    """One way of saving one engine; every rank calls it, in the same order."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """What the user calls."""

    def is_on_disk(self, folder: Path) -> bool:
        """Whether the save has ended; from another thread."""
        return True

    def finish(self) -> None:  # noqa: B027 (most have nothing to say)
        """Raise what an asynchronous save has met."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """What the user calls."""

    @abstractmethod
    def state(self) -> Iterator[Tensor]:
        """This rank's masters and optimizer states."""

    @abstractmethod
    def parameters(self) -> Iterator[Tensor]:
        """What the model computes with, where that is not the masters."""

    def close(self) -> None:  # noqa: B027 (most have none)
        """Give back groups."""


class OnefoldSaver(Saver):
    """``engine.save_checkpoint``, asynchronous or not; its files are flushed and have checksums."""

    def __init__(self, engine: Engine, way: Way) -> None:
        assert isinstance(engine, Onefold)
        self._engine = engine.engine
        # Left out where it is False, so that the call is the one that most users write.
        self._options: dict[str, Any] = {"async_save": True} if way.kind.is_async else {}

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(folder, **self._options)

    def is_on_disk(self, folder: Path) -> bool:
        # The tag of the newest checkpoint is the last thing that a save writes.
        return (folder / LATEST).exists()

    def load(self, folder: Path) -> None:
        found, _ = self._engine.load_checkpoint(folder)
        if found is None:
            raise RuntimeError("load_checkpoint() found nothing")

    def state(self) -> Iterator[Tensor]:
        optimizer = self._engine.optimizer
        yield from _with_states(_params_of(optimizer), optimizer)

    def parameters(self) -> Iterator[Tensor]:
        if not self._engine.plan.home.shards_parameters:
            yield from self._engine.module.parameters()


class DcpSaver(Saver):
    """``torch.distributed.checkpoint`` of FSDP2, through ``get_state_dict``."""

    def __init__(self, engine: Engine, way: Way) -> None:
        assert isinstance(engine, Fsdp2)
        self._model: nn.Module = engine.model
        self._optimizer = engine.optimizer
        self._flushes = way.kind.flushes
        self._future: Future[Any] | None = None
        # The thread of an asynchronous save sends while training does: it needs its own group.
        self._group = dist.new_group(backend="gloo") if way.kind.is_async else None

    def save(self, folder: Path) -> None:
        state = self._state_dict()
        if self._group is not None:
            future = dcp_async_save(state, checkpoint_id=folder, process_group=self._group)
            assert isinstance(future, Future)
            self._future = future
        elif self._flushes:  # the default of its writer
            dcp_save(state, checkpoint_id=folder)
        else:
            dcp_save(state, storage_writer=FileSystemWriter(folder, sync_files=False))

    def _state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def is_on_disk(self, folder: Path) -> bool:
        return self._future is None or self._future.done()

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()

    def load(self, folder: Path) -> None:
        state = self._state_dict()
        dcp_load(state, checkpoint_id=folder)
        missed = set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        if missed.missing_keys or missed.unexpected_keys:
            raise RuntimeError(f"set_state_dict() did not fit: {missed}")

    def state(self) -> Iterator[Tensor]:
        for tensor in _with_states(_params_of(self._optimizer), self._optimizer):
            yield tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def parameters(self) -> Iterator[Tensor]:
        return iter(())  # the shards are the masters

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)


class DeepSpeedSaver(Saver):
    """``engine.save_checkpoint`` with the default writer, followed by fsync of its files or not."""

    def __init__(self, engine: Engine, way: Way) -> None:
        assert isinstance(engine, DeepSpeed)
        self._engine = engine.engine
        self._stage = way.stage
        self._flushes = way.kind.flushes

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(folder)
        if self._flushes:
            dist.barrier()  # only then are all files there
            flush(own_files(folder))

    def load(self, folder: Path) -> None:
        found, _ = self._engine.load_checkpoint(folder)
        if found is None:
            raise RuntimeError("load_checkpoint() found nothing")

    def state(self) -> Iterator[Tensor]:
        zero = self._engine.optimizer
        # Not of its param groups, which ZeRO-3 fills in the step alone.
        masters = (
            zero.fp32_partitioned_groups_flat
            if self._stage == 3
            else zero.single_partition_of_fp32_groups
        )
        yield from _with_states(masters, zero.optimizer)

    def parameters(self) -> Iterator[Tensor]:
        for param in self._engine.module.parameters():
            yield param.ds_tensor if self._stage == 3 else param


def saver_of(engine: Engine, way: Way) -> Saver:
    """The saver of that way, on all ranks together."""
    makers: dict[str, Callable[[Engine, Way], Saver]] = {
        "bare": OnefoldSaver,
        "fsdp2": DcpSaver,
        "deepspeed": DeepSpeedSaver,
    }
    return makers[way.kind.engine](engine, way)


def _params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _with_states(masters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Each master and its states, by name: a load may have put these anew, in another order.

    Not of empty pieces: they have no states before a load, and may have a step count after it.
    """
    for master in masters:
        if not master.numel():
            continue
        yield master
        states = optimizer.state[master]
        yield from (states[key] for key in sorted(states) if isinstance(states[key], Tensor))


# -- files ----------------------------------------------------------------------------------------


def own_files(folder: Path) -> list[Path]:
    """This rank's share of all files below a folder: about as many bytes as every other rank's."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files.sort(key=lambda path: (-path.stat().st_size, path))
    return files[dist.get_rank() :: dist.get_world_size()]


def flush(files: list[Path]) -> None:
    """Wait until the disk has them."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
