"""Checkpointer: saves and loads one engine; every rank calls it, in the same order.

Errors are exchanged before anything is written into the folder's place or into the engine, so all
ranks raise or none does.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from onefold.errors import CheckpointError, StateError, describe
from onefold.optim.scaler import LossScaler
from onefold.parts import Parts
from onefold.state import rng
from onefold.state.files import FileEntry, Reader, what_is_wrong, write_tensors
from onefold.state.folder import Folder, candidates, check_tag, saving_path
from onefold.state.index import BufferEntry, Index, Progress, World, file_of, read_index
from onefold.state.merge import merge_rows
from onefold.state.plain import check_json, decode, encode
from onefold.state.restore import Wanted, fill, set_groups, what_differs
from onefold.state.snapshot import Snapshot, held_by, persistent_buffers, take
from onefold.step import Stepper
from onefold.transaction import Transaction

log = logging.getLogger(__name__)
T = TypeVar("T")


class Checkpointer:
    """What an engine needs for its checkpoints."""

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
        self._folders: dict[Path, Folder] = {}

    def close(self) -> None:
        """Give back the folders."""
        for folder in self._folders.values():
            folder.close()
        self._folders.clear()

    # -- saving --------------------------------------------------------------------------------

    def save(
        self,
        directory: Path,
        tag: str,
        progress: Progress,
        client_state: dict[str, Any],
        keep_last: int | None,
    ) -> Path:
        """Write one checkpoint; see ``Engine.save_checkpoint``."""
        try:
            own, mine = self._together(
                "save_checkpoint()", lambda: self._prepare(directory, tag, client_state, keep_last)
            )
            everyone = self._world.control.gather((mine, {"tag": tag, "client": client_state}))
            told = [theirs for theirs, _ in everyone]
            self._together(
                "save_checkpoint()", lambda: self._check_alike([said for _, said in everyone])
            )
            digests = [row["digests"] for row in told]
            writes = {
                name: buffer
                for name, buffer in persistent_buffers(self._parts.module).items()
                if self._world.rank == 0 or mine["digests"][name] != digests[0].get(name)
            }
            files = self._together(
                "save_checkpoint()", lambda: self._write(saving_path(directory, tag), own, writes)
            )
            everything: dict[str, FileEntry] = {}
            for theirs in self._world.control.gather(files):
                everything |= theirs

            def commit() -> Path:
                if self._world.rank != 0:
                    return directory / tag
                index = self._index(told, everything, progress, client_state)
                final = self._folders[directory].commit(tag, index.to_json())
                if keep_last is not None:
                    self._folders[directory].prune(keep_last)
                return final

            return self._together("save_checkpoint()", commit)
        except BaseException:
            if directory in self._folders:
                self._folders[directory].abandon(tag)
            raise

    def _prepare(
        self, directory: Path, tag: str, client_state: dict[str, Any], keep_last: int | None
    ) -> tuple[Snapshot, dict[str, Any]]:
        """Everything that can be wrong on one rank; rank 0 makes the temporary folder."""
        self._transaction.refuse_unstepped("save_checkpoint()")
        check_tag(tag)
        if keep_last is not None and keep_last < 1:
            raise ValueError(
                f"save_checkpoint(keep_last={keep_last}): expected 1 or more, because the new one "
                "counts, or None to keep all."
            )
        check_json(client_state, "save_checkpoint(client_state=)")
        parts = self._parts
        own = take(parts.units, self._pieces, parts.optimizer, self._world.rank)
        buffers = persistent_buffers(parts.module)
        mine = {
            "rows": own.rows,
            "rng": rng.capture(parts.arena.device),
            "digests": {name: _digest(buffer) for name, buffer in buffers.items()},
        }
        if self._world.rank == 0:
            if directory not in self._folders:
                self._folders[directory] = Folder(directory)
            self._folders[directory].begin(tag)
            self._settings()  # refused now, and not after everything is written
        return own, mine

    def _check_alike(self, said: Sequence[dict[str, Any]]) -> None:
        for rank, theirs in enumerate(said):
            if theirs != said[0]:
                raise ValueError(
                    f"save_checkpoint(): rank {rank} was given another tag or client_state than "
                    f"rank 0: {theirs} against {said[0]}. Pass the same on every rank."
                )

    def _write(
        self, folder: Path, own: Snapshot, buffers: dict[str, Tensor]
    ) -> dict[str, FileEntry]:
        rank = self._world.rank
        tensors = own.master | {f"buffer/{name}": buffer for name, buffer in buffers.items()}
        names = file_of("master", rank), file_of("optimizer", rank)
        return {
            name: write_tensors(folder / name, content)
            for name, content in zip(names, (tensors, own.optimizer), strict=True)
        }

    def _settings(self) -> tuple[list[dict[str, Any]], Any]:
        groups = [
            {
                key: encode(value, f"param group {position}, {key!r}")
                for key, value in group.items()
                if key != "params"
            }
            for position, group in enumerate(self._parts.optimizer.param_groups)
        ]
        scheduler = self._lr_scheduler
        state = None if scheduler is None else encode(scheduler.state_dict(), "lr_scheduler")
        return groups, state

    def _index(
        self,
        told: Sequence[dict[str, Any]],
        files: dict[str, FileEntry],
        progress: Progress,
        client_state: dict[str, Any],
    ) -> Index:
        parts, grid = self._parts, self._world.grid
        groups, scheduler = self._settings()
        digests = [row["digests"] for row in told]
        buffers = {
            name: BufferEntry(
                shape=tuple(buffer.shape),
                dtype=str(buffer.dtype).removeprefix("torch."),
                ranks=tuple(
                    rank
                    for rank, theirs in enumerate(digests)
                    if rank == 0 or theirs.get(name) not in (None, digests[0][name])
                ),
            )
            for name, buffer in persistent_buffers(parts.module).items()
        }
        return Index(
            onefold=version("onefold"),
            torch=torch.__version__,
            config=parts.config.model_dump(mode="json"),
            world=World(size=self._world.size, axes=grid.axes, sizes=grid.sizes),
            progress=progress,
            optimizer=type(parts.optimizer).__name__,
            groups=groups,
            scheduler=scheduler,
            loss_scaler=self._scaler.state_dict(),
            params=merge_rows(row["rows"] for row in told),
            buffers=buffers,
            rng=[row["rng"] for row in told],
            client_state=client_state,
            files=files,
        )

    # -- loading -------------------------------------------------------------------------------

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

        self._together("load_checkpoint()", check)

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
            progress: with loss scale and random number generators.
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

        self._together("load_checkpoint()", check)

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
                if self._world.rank < len(index.rng):
                    rng.restore(index.rng[self._world.rank], parts.arena.device)

        self._together("load_checkpoint()", read)

    def _fill_buffers(self, index: Index, reader: Reader, wanted: Wanted) -> None:
        for name, buffer in persistent_buffers(self._parts.module).items():
            entry = index.buffers.get(name)
            if entry is None or not wanted.has(name):
                continue
            rank = self._world.rank if self._world.rank in entry.ranks else entry.ranks[0]
            reader.read_whole(file_of("master", rank), f"buffer/{name}", buffer)

    def _together(self, call: str, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank; all raise if one does."""
        result, error = None, None
        try:
            result = work()
        except Exception as found:
            error = found
        told = self._world.control.gather(None if error is None else describe(error))
        if error is not None:
            raise error
        for rank, theirs in enumerate(told):
            if theirs is not None:
                raise CheckpointError(f"{call}: rank {rank} failed: {theirs}")
        return result  # type: ignore[return-value]


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()
