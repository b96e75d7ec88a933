"""Saver: writes checkpoints of one engine; every rank calls it, in the same order.

An asynchronous save is the same work done by another thread, on copies and over a control group of
its own. Errors are exchanged before a checkpoint gets its name, so all ranks raise or none does.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from onefold.names import persistent_buffers, tied_names
from onefold.optim.scaler import LossScaler
from onefold.parts import Parts
from onefold.state import rng
from onefold.state.agree import on_all_ranks
from onefold.state.files import FileEntry, write_tensors
from onefold.state.folder import Folder, check_tag, saving_path
from onefold.state.index import BufferEntry, Index, Progress, World, file_of
from onefold.state.merge import merge_rows
from onefold.state.plain import check_json, encode
from onefold.state.snapshot import ParamRow, dtype_text, take
from onefold.step import Stepper
from onefold.transaction import Transaction
from onefold.wire.control import Control
from onefold.wire.mesh import join_control

log = logging.getLogger(__name__)
T = TypeVar("T")

_CALL: Final = "save_checkpoint()"

Contents = dict[str, dict[str, Tensor]]
"""What one rank writes: tensors by name, by file."""


class Request(NamedTuple):
    """What the user asked for; the same on every rank."""

    directory: Path
    tag: str
    client_state: dict[str, Any]
    keep_last: int | None
    progress: Progress


class _Told(NamedTuple):
    """What every rank learns of every other."""

    rank: int
    same: str
    """Must be equal everywhere."""
    rows: list[ParamRow]
    rng: dict[str, Any]
    dataloader: Any
    digests: dict[str, str]
    """Of the buffers."""


class Saver:
    """What an engine needs to save checkpoints."""

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
        self._thread: ThreadPoolExecutor | None = None
        self._thread_control: Control | None = None
        self._in_flight: Future[Path] | None = None
        """The asynchronous save that has not been looked at; begins and ends on all ranks alike."""

    def save(self, request: Request, *, is_async: bool) -> Path:
        """Write one checkpoint; see ``Engine.save_checkpoint``."""
        self.wait()
        if is_async and self._thread is None:
            self._thread_control = join_control(self._world, self._parts.config.timeout_s)
            self._thread = ThreadPoolExecutor(1, "onefold-checkpoint")
        with self._abandoned_if_failed(request):
            contents, index = self._capture(request)
            if is_async:
                contents = self._everywhere(partial(_copied, contents))
        if not is_async:
            return self._finish(self._world.control, request, contents, index)
        assert self._thread is not None
        arguments = self._thread_control, request, contents, index
        self._in_flight = self._thread.submit(self._finish_logged, *arguments)
        return request.directory / request.tag

    def poll(self) -> None:
        """At the end of a step: if the save in flight has ended on all ranks, ``wait``.

        Communication: none if nothing is in flight, else one exchange.
        """
        if self._in_flight is None:
            return
        (is_busy,) = self._world.control.largest([not self._in_flight.done()])
        if not is_busy:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if any, and raise its error, on all ranks."""
        if self._in_flight is not None:
            future, self._in_flight = self._in_flight, None
            self._everywhere(future.result)

    def close(self) -> None:
        """Wait for the save in flight, give back the folders, and raise the error of that save."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._thread_control is not None:
            self._thread_control.destroy()
        for folder in self._folders.values():
            folder.close()
        self._folders.clear()
        if self._in_flight is not None:
            future, self._in_flight = self._in_flight, None
            future.result()

    # -- on the calling thread -----------------------------------------------------------------

    def _capture(self, request: Request) -> tuple[Contents, Index | None]:
        """What this rank writes, as views, and on rank 0 the index of it all, but for the files."""
        told, contents = self._everywhere(partial(self._prepare, request))
        everyone = sorted(self._world.control.gather(told))
        self._everywhere(partial(_check_alike, [theirs.same for theirs in everyone]))
        digests = [theirs.digests for theirs in everyone]
        for name, buffer in persistent_buffers(self._parts.module).items():
            if self._world.rank == 0 or told.digests[name] != digests[0].get(name):
                contents[file_of("master", self._world.rank)][f"buffer/{name}"] = buffer.detach()

        def index() -> Index | None:
            return self._index(everyone, request) if self._world.rank == 0 else None

        return contents, self._everywhere(index)

    def _prepare(self, request: Request) -> tuple[_Told, Contents]:
        """Everything that can be wrong on one rank; rank 0 makes the temporary folder."""
        self._transaction.refuse_unstepped(_CALL)
        check_tag(request.tag)
        if request.keep_last is not None and request.keep_last < 1:
            raise ValueError(
                f"save_checkpoint(keep_last={request.keep_last}): expected 1 or more, because the "
                "new one counts, or None to keep all."
            )
        check_json(request.client_state, "save_checkpoint(client_state=)")
        parts, rank = self._parts, self._world.rank
        own = take(parts.units, self._pieces, parts.optimizer, rank)
        buffers = persistent_buffers(parts.module)
        loader = parts.dataloader
        told = _Told(
            rank=rank,
            same=json.dumps([request.tag, request.keep_last, request.client_state], sort_keys=True),
            rows=own.rows,
            rng=rng.capture(parts.arena.device),
            dataloader=None if loader is None else encode(loader.state_dict(), "the data loader"),
            digests={name: _digest(buffer) for name, buffer in buffers.items()},
        )
        if rank == 0:
            if request.directory not in self._folders:
                self._folders[request.directory] = Folder(request.directory)
            self._folders[request.directory].begin(request.tag)
        contents = {file_of("master", rank): own.master, file_of("optimizer", rank): own.optimizer}
        return told, contents

    def _index(self, everyone: Sequence[_Told], request: Request) -> Index:
        parts, grid = self._parts, self._world.grid
        groups = [
            {
                key: encode(value, f"param group {position}, {key!r}")
                for key, value in group.items()
                if key != "params"
            }
            for position, group in enumerate(parts.optimizer.param_groups)
        ]
        scheduler = self._lr_scheduler
        digests = [theirs.digests for theirs in everyone]
        buffers = {
            name: BufferEntry(
                shape=tuple(buffer.shape),
                dtype=dtype_text(buffer.dtype),
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
            progress=request.progress,
            optimizer=type(parts.optimizer).__name__,
            groups=groups,
            scheduler=None if scheduler is None else encode(scheduler.state_dict(), "lr_scheduler"),
            loss_scaler=self._scaler.state_dict(),
            params=merge_rows(theirs.rows for theirs in everyone),
            tied=tied_names(parts.module),
            buffers=buffers,
            rng=[theirs.rng for theirs in everyone],
            dataloader=[theirs.dataloader for theirs in everyone],
            client_state=request.client_state,
            files={},
        )

    def _everywhere(self, work: Callable[[], T]) -> T:
        return on_all_ranks(self._world.control, _CALL, work)

    # -- on either thread ----------------------------------------------------------------------

    def _finish(
        self, control: Control, request: Request, contents: Contents, index: Index | None
    ) -> Path:
        """Write this rank's files; when all ranks have, rank 0 makes it a checkpoint."""

        def write() -> dict[str, FileEntry]:
            folder = saving_path(request.directory, request.tag)
            return {name: write_tensors(folder / name, own) for name, own in contents.items()}

        def commit() -> None:
            if index is None:
                return
            folder = self._folders[request.directory]
            folder.commit(request.tag, index.model_copy(update={"files": files}).to_json())
            if request.keep_last is not None:
                folder.prune(request.keep_last)

        with self._abandoned_if_failed(request):
            own = on_all_ranks(control, _CALL, write)
            files = {name: entry for told in control.gather(own) for name, entry in told.items()}
            on_all_ranks(control, _CALL, commit)
        return request.directory / request.tag

    def _finish_logged(self, *arguments: Any) -> Path:
        """The thread's work; its error may be met by nobody, where the job ends before a step."""
        try:
            return self._finish(*arguments)
        except Exception as error:
            log.error("asynchronous save_checkpoint() has failed: %s", error)
            raise

    @contextmanager
    def _abandoned_if_failed(self, request: Request) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if request.directory in self._folders:
                self._folders[request.directory].abandon(request.tag)
            raise


def _check_alike(said: Sequence[str]) -> None:
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            raise ValueError(
                f"save_checkpoint(): rank {rank} was given another tag, keep_last or client_state "
                f"than rank 0: {theirs} against {said[0]}. Pass the same on every rank."
            )


def _copied(contents: Contents) -> Contents:
    """Copies on the host, which training does not write into."""
    return {
        file: {name: tensor.to("cpu", copy=True) for name, tensor in own.items()}
        for file, own in contents.items()
    }


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()
