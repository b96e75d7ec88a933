"""Loader: finds a checkpoint and fills one engine with it; every rank calls it, in the same order.

Errors are exchanged before anything is written into the engine, so all ranks raise or none does.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from torch.optim.lr_scheduler import LRScheduler

from onefold.dataloader import restore
from onefold.errors import CheckpointError, StateError
from onefold.names import persistent_buffers
from onefold.optim.scaler import LossScaler
from onefold.parts import Parts
from onefold.state import rng
from onefold.state.agree import on_all_ranks
from onefold.state.files import Reader, TensorReader, what_is_wrong
from onefold.state.folder import candidates
from onefold.state.index import LATEST_UNIVERSAL, LOAD_UNIVERSAL, Index, file_of, read_index
from onefold.state.plain import decode
from onefold.state.restore import Wanted, fill, set_groups, what_differs
from onefold.state.snapshot import held_by
from onefold.state.universal.open import open_universal
from onefold.state.universal.survey import locate
from onefold.step import Stepper
from onefold.transaction import Transaction

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A verified checkpoint."""

    folder: Path
    index: Index
    reader: TensorReader


class Loader:
    """What an engine needs to load checkpoints."""

    def __init__(
        self,
        parts: Parts,
        stepper: Stepper,
        transaction: Transaction,
        scaler: LossScaler,
        lr_scheduler: LRScheduler | None,
    ) -> None:
        self._parts = parts
        self._pieces = stepper.masters.pieces
        self._transaction = transaction
        self._scaler = scaler
        self._lr_scheduler = lr_scheduler
        self._world = parts.world

    def check_may_load(self) -> None:
        """Raise StateError, on every rank, where one is inside a scope or between two passes."""

        def check() -> None:
            self._transaction.refuse_inside("load_checkpoint()")
            for unit in self._parts.units:
                if unit.frees_parameters and unit.holds:
                    raise StateError(
                        f"load_checkpoint(): the parameters of {unit.name} are in use on rank "
                        f"{self._world.rank}. Call it between a step and the next forward."
                    )

        on_all_ranks(self._world.control, "load_checkpoint()", check)

    def find(self, directory: Path, tag: str | None, wanted: Wanted) -> Found | None:
        """The checkpoint to load, verified by all ranks together; None if there is none at all.

        Every file is read whole by one rank. Without a ``tag`` the newest one that is not damaged
        is taken, and a warning names those that are; of DeepSpeed's, ``latest_universal`` counts.

        Raises:
            CheckpointError: the one named by ``tag``, or every one, is damaged, or not of the kind
                that the config says; names the files.
        """
        control = self._world.control
        if self._parts.config.load_universal:
            folder = locate(directory, tag, control)
            return Found(folder, *open_universal(folder, self._parts, self._lr_scheduler, wanted))
        listed = [directory / tag] if tag is not None else candidates(directory)
        is_universal = (directory / LATEST_UNIVERSAL).exists()
        listed, is_universal = control.gather((listed, is_universal))[0]
        if not listed and is_universal:
            raise CheckpointError(
                f"load_checkpoint({str(directory)!r}): expected checkpoints of onefold's, got "
                f"DeepSpeed's universal ones alone. Load these with {LOAD_UNIVERSAL}."
            )
        damaged: list[str] = []
        for folder in listed:
            index: Index | None = None
            wrong: list[str] = []
            try:
                index = read_index(folder)
                own = sorted(index.files.items())[self._world.rank :: self._world.size]
                wrong = [text for n, e in own if (text := what_is_wrong(folder / n, e))]
            except CheckpointError as error:
                wrong = [str(error)]
            found = [text for theirs in control.gather(wrong) for text in theirs]
            if not found and index is not None:
                if damaged and self._world.rank == 0:
                    log.warning("load_checkpoint(): taking %s, because of %s", folder, damaged)
                return Found(folder, index, Reader(folder))
            damaged += dict.fromkeys(found)
        if damaged:
            raise CheckpointError(
                f"load_checkpoint({str(directory)!r}): no checkpoint here is whole: "
                + "; ".join(damaged)
            )
        return None

    def load(self, found: Found, wanted: Wanted) -> None:
        """Fill masters, buffers and states; the caller publishes. See ``Engine.load_checkpoint``.

        Args:
            found: the checkpoint.
            wanted: what of it.
        """
        parts = self._parts
        folder, index, reader = found.folder, found.index, found.reader
        held = list(held_by(parts.units, self._pieces))
        names = {n for row in self._world.control.gather([h.name for h in held]) for n in row}

        def check() -> None:
            problems = what_differs(index, sorted(names), held, parts.optimizer, wanted)
            problems += self._buffer_differences(index, wanted)
            if wanted.scheduler and (index.scheduler is None) != (self._lr_scheduler is None):
                has, had = self._lr_scheduler is not None, index.scheduler is not None
                problems.append(f"the engine has a scheduler: {has}; the checkpoint has one: {had}")
            if problems:
                raise CheckpointError(
                    f"load_checkpoint(): {folder} does not fit the engine:\n  "
                    + "\n  ".join(problems)
                    + "\nLoad a part of it with include=, exclude=, load_module_only=True, "
                    "load_optimizer_states=False or load_lr_scheduler_states=False."
                )

        on_all_ranks(self._world.control, "load_checkpoint()", check)

        def read() -> None:
            try:
                for one in held:
                    if wanted.has(one.name):
                        fill(index, reader, one, parts.optimizer, wanted)
                self._fill_buffers(index, reader, wanted)
            finally:
                reader.close()
            if wanted.optimizer:
                set_groups(parts.optimizer, index.groups)
            if wanted.scheduler and self._lr_scheduler is not None:
                self._lr_scheduler.load_state_dict(decode(index.scheduler))
            if wanted.progress:
                if index.loss_scaler:
                    self._scaler.load_state_dict(index.loss_scaler)
                self._set_dataloader(index)
                if self._world.rank < len(index.rng):
                    rng.restore(index.rng[self._world.rank], parts.arena.device)

        on_all_ranks(self._world.control, "load_checkpoint()", read)

    def _set_dataloader(self, index: Index) -> None:
        loader, saved = self._parts.dataloader, index.dataloader
        rank, size = self._world.rank, self._world.size
        if loader is None or not saved:
            return
        reason = None
        if None in saved:
            reason = "the checkpoint has none"
        elif not restore(loader, decode(saved), rank, size):
            reason = f"the checkpoint has those of {len(saved)} ranks, and here are {size}"
        if reason is not None and rank == 0:
            log.warning("load_checkpoint(): the data loader's place is not restored: %s", reason)

    def _buffer_differences(self, index: Index, wanted: Wanted) -> list[str]:
        return [
            f"{name}: shape {tuple(buffer.shape)} in the model, {entry.shape} in the checkpoint"
            for name, buffer in persistent_buffers(self._parts.module).items()
            if wanted.has(name)
            and (entry := index.buffers.get(name)) is not None
            and entry.shape != tuple(buffer.shape)
        ]

    def _fill_buffers(self, index: Index, reader: TensorReader, wanted: Wanted) -> None:
        missing = []
        for name, buffer in persistent_buffers(self._parts.module).items():
            entry = index.buffers.get(name)
            if not wanted.has(name):
                continue
            if entry is None:
                missing.append(name)
                continue
            rank = self._world.rank if self._world.rank in entry.ranks else entry.ranks[0]
            reader.read_whole(file_of("master", rank), f"buffer/{name}", buffer)
        if missing and self._world.rank == 0:
            log.warning("load_checkpoint(): buffers that are not in the checkpoint: %s", missing)
