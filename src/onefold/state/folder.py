"""Folder: where checkpoints lie, and how one comes to be there whole or not at all.

    DIR/latest              the tag of the newest one
    DIR/TAG/                a checkpoint: index.json and the files that it names
    DIR/.TAG.saving/        one that is being written, or was when its job died
    DIR/.TAG.replaced/      an older one of the same tag, until the new one is in its place
    DIR/.lock               held by the job that writes here, as long as it lives

A checkpoint is written under its temporary name and flushed; renaming the folder makes it one, and
``latest`` moves after that. So at any moment ``DIR/TAG`` is whole or is not there.
"""

import fcntl
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Final

from onefold.errors import CheckpointError
from onefold.state.files import digest_of
from onefold.state.index import DIGEST, INDEX, read_index

LATEST: Final = "latest"
_SAVING, _REPLACED = ".saving", ".replaced"

_locks: Final[set[int]] = set()
"""File descriptors of this process's locks."""


@cache
def _at_fork() -> None:
    """Once per process and its children."""

    def close() -> None:
        for lock in _locks:
            os.close(lock)
        _locks.clear()

    os.register_at_fork(after_in_child=close)


class Folder:
    """One job's right to write checkpoints into ``path``; for rank 0.

    The lock belongs to the open file, so it ends with the last process that has it open. A forked
    child (a data loader's worker, which may outlive a killed rank by seconds) closes it at once.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            CheckpointError: another job, or another engine, has it.
        """
        self.path = path
        _at_fork()
        path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise CheckpointError(
                f"save_checkpoint({str(path)!r}): another job or engine saves into this folder. "
                "Give each a folder of its own."
            ) from None
        _locks.add(self._lock)

    def close(self) -> None:
        """Give the lock back; it goes with the process, too."""
        _locks.discard(self._lock)
        os.close(self._lock)

    def begin(self, tag: str) -> None:
        """Make the temporary folder of ``tag``; what dead jobs left goes."""
        for left in self.path.glob(f".*{_SAVING}"):
            shutil.rmtree(left)
        saving_path(self.path, tag).mkdir()

    def abandon(self, tag: str) -> None:
        """Remove what was written of ``tag``."""
        shutil.rmtree(saving_path(self.path, tag), ignore_errors=True)

    def commit(self, tag: str, index: str) -> Path:
        """Write the index, and make what lies under the temporary name the checkpoint."""
        saving, final = saving_path(self.path, tag), self.path / tag
        _write(saving / INDEX, index)
        _write(saving / DIGEST, f"{digest_of(saving / INDEX)}  {INDEX}\n")
        _sync(saving)
        replaced = self.path / f".{tag}{_REPLACED}"
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        saving.rename(final)
        _sync(self.path)
        fresh = self.path / f".{LATEST}"
        fresh.unlink(missing_ok=True)
        _write(fresh, tag)
        fresh.replace(self.path / LATEST)
        _sync(self.path)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def prune(self, keep_last: int) -> None:
        """Delete all but the newest ``keep_last`` checkpoints."""
        for old in candidates(self.path)[keep_last:]:
            going = self.path / f".{old.name.strip('.')}{_SAVING}"  # no checkpoint from here on
            old.rename(going)
            shutil.rmtree(going)


def saving_path(path: Path, tag: str) -> Path:
    """Where ``tag`` is written."""
    return path / f".{tag}{_SAVING}"


def check_tag(tag: str) -> None:
    """Refuse what is no plain folder name.

    Raises:
        ValueError: says so.
    """
    if not tag or tag.startswith(".") or "/" in tag or "\0" in tag or tag == LATEST:
        raise ValueError(
            f"save_checkpoint(tag={tag!r}): expected the name of a folder, without '/' and not "
            f"beginning with '.', other than {LATEST!r}."
        )


def candidates(path: Path) -> list[Path]:
    """All checkpoints of a folder: what ``latest`` says first, there or not, then newest first."""
    if not path.is_dir():
        return []
    latest = latest_of(path)
    found = [
        child
        for child in path.iterdir()
        if (child.name.endswith(_REPLACED) or not child.name.startswith("."))
        and (child / INDEX).exists()
        and child.name != latest
    ]
    found.sort(key=_age, reverse=True)
    return [path / latest, *found] if latest is not None else found


def latest_of(path: Path) -> str | None:
    """The tag in ``latest``; None where there is none."""
    try:
        return (path / LATEST).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _age(folder: Path) -> tuple[int, int]:
    try:
        return read_index(folder).progress.global_steps, (folder / INDEX).stat().st_mtime_ns
    except (CheckpointError, OSError):
        return -1, 0


def _write(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Flush the entries of a folder, so that a rename survives the power going."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
