"""Loader: finds a checkpoint and fills one engine with it; every rank calls it, in the same order.

Errors are exchanged before anything is written into the engine, so all ranks raise or none does.
"""

import logging
from pathlib import Path

from torch.optim.lr_scheduler import LRScheduler

from onefold.dataloader import restore
from onefold.errors import CheckpointError, StateError
from onefold.names import persistent_buffers
from onefold.optim.scaler import LossScaler
from onefold.parts import Parts
from onefold.state import rng
from onefold.state.agree import on_all_ranks
from onefold.state.files import Reader, what_is_wrong
from onefold.state.folder import candidates
from onefold.state.index import Index, file_of, read_index
from onefold.state.plain import decode
from onefold.state.restore import Wanted, fill, set_groups, what_differs
from onefold.state.snapshot import held_by
from onefold.step import Stepper
from onefold.transaction import Transaction

log = logging.getLogger(__name__)


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

    def find(self, directory: Path, tag: str | None) -> tuple[Path, Index] | None:
        """The checkpoint to load, verified by all ranks together; None if there is none at all.

        Every file is read whole by one rank. Without a ``tag`` the newest one that is not damaged
        is taken, and a warning names those that are.

        Raises:
            CheckpointError: the one named by ``tag``, or every one, is damaged; names the files.
        """
        control = self._world.control
        listed = [directory / tag] if tag is not None else candidates(directory)
        listed = control.gather(listed)[0]
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
                return folder, index
            damaged += dict.fromkeys(found)
        if damaged:
            raise CheckpointError(
                f"load_checkpoint({str(directory)!r}): no checkpoint here is whole: "
                + "; ".join(damaged)
            )
        return None

    def load(
        self, folder: Path, index: Index, wanted: Wanted, *, scheduler: bool, progress: bool
    ) -> None:
        """Fill masters, buffers and states; the caller publishes. See ``Engine.load_checkpoint``.

        Args:
            folder: a verified checkpoint.
            index: its index.
            wanted: which parameters, and whether with the optimizer's states.
            scheduler: with the scheduler's state.
            progress: with loss scale, random number generators and the place in the data.
        """
        parts = self._parts
        held = list(held_by(parts.units, self._pieces))
        names = {n for row in self._world.control.gather([h.name for h in held]) for n in row}

        def check() -> None:
            problems = what_differs(index, sorted(names), held, parts.optimizer, wanted)
            if scheduler and (index.scheduler is None) != (self._lr_scheduler is None):
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
            reader = Reader(folder)
            try:
                for one in held:
                    if wanted.has(one.name):
                        fill(index, reader, one, parts.optimizer, wanted)
                self._fill_buffers(index, reader, wanted)
            finally:
                reader.close()
            if wanted.optimizer:
                set_groups(parts.optimizer, index.groups)
            if scheduler and self._lr_scheduler is not None:
                self._lr_scheduler.load_state_dict(decode(index.scheduler))
            if progress:
                self._scaler.load_state_dict(index.loss_scaler)
                self._set_dataloader(index)
                if self._world.rank < len(index.rng):
                    rng.restore(index.rng[self._world.rank], parts.arena.device)

        on_all_ranks(self._world.control, "load_checkpoint()", read)

    def _set_dataloader(self, index: Index) -> None:
        loader, saved = self._parts.dataloader, index.dataloader
        rank, size = self._world.rank, self._world.size
        if loader is None:
            return
        reason = None
        if None in saved:
            reason = "the checkpoint has none"
        elif not restore(loader, decode(saved), rank, size):
            reason = f"the checkpoint has those of {len(saved)} ranks, and here are {size}"
        if reason is not None and rank == 0:
            log.warning("load_checkpoint(): the data loader's place is not restored: %s", reason)

    def _fill_buffers(self, index: Index, reader: Reader, wanted: Wanted) -> None:
        for name, buffer in persistent_buffers(self._parts.module).items():
            entry = index.buffers.get(name)
            if entry is None or not wanted.has(name):
                continue
            rank = self._world.rank if self._world.rank in entry.ranks else entry.ranks[0]
            reader.read_whole(file_of("master", rank), f"buffer/{name}", buffer)
