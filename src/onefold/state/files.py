"""Files: tensors on disk in safetensors' format, written in a stream and read by ranges.

The format is eight bytes with the length of a JSON header, the header, and the tensors' bytes one
after another. It is written here, and not by the library, because that needs the whole file in
memory, and leaves checksum and flush to a second pass; reading is the library's.
"""

import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import safe_open
from torch import Tensor

CHUNK_BYTES: Final = 4 << 20
_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class FileEntry(BaseModel):
    """What the index says of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int
    sha256: str


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    materialise: Callable[[str, Tensor], Tensor] | None = None,
) -> FileEntry:
    """Write a new file and flush it to the disk.

    Args:
        path: must not exist.
        tensors: by name; contiguous, on any device (on meta with ``materialise``).
        metadata: strings, for the header.
        materialise: given a name and its tensor just before it is written, the values to write.

    Raises:
        OSError: as of the file system.
        TypeError: safetensors has no such dtype.
    Memory: a few ``CHUNK_BYTES`` above the tensors.
    """
    header = _header(tensors, metadata or {})
    size = 0
    with _Digest() as digest, path.open("xb", buffering=0) as file:

        def put(data: bytes | memoryview) -> None:
            nonlocal size
            digest.update(data)
            written = 0
            while written < len(data):  # a raw file may take less than all
                written += file.write(data[written:])
            size += written

        put(len(header).to_bytes(8, "little"))
        put(header)
        for name, tensor in tensors.items():
            for chunk in _chunks(materialise(name, tensor) if materialise else tensor):
                put(chunk)
        os.fsync(file.fileno())
    return FileEntry(size=size, sha256=digest.hexdigest())


class _Digest:
    """SHA-256 on a thread of its own, because hashing takes as long as writing does.

    Where the interpreter is ending and starts no more threads (an asynchronous save may be the last
    thing that a process does), it hashes in place.
    """

    _AHEAD: Final = 2
    """Chunks that wait; each is held in memory until it is hashed."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._chunks: queue.Queue[bytes | memoryview | None] = queue.Queue(self._AHEAD)
        self._thread = threading.Thread(target=self._run, name="onefold-sha256", daemon=True)
        try:
            self._thread.start()
            self._is_apart = True
        except RuntimeError:
            self._is_apart = False

    def __enter__(self) -> "_Digest":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_apart:
            self._chunks.put(None)
            self._thread.join()

    def update(self, data: bytes | memoryview) -> None:
        """More of the file; not to be written into until the end."""
        if self._is_apart:
            self._chunks.put(data)
        else:
            self._digest.update(data)

    def hexdigest(self) -> str:
        """After the end of the with-block."""
        return self._digest.hexdigest()

    def _run(self) -> None:
        while (data := self._chunks.get()) is not None:
            self._digest.update(data)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    rows: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}: safetensors has no dtype {tensor.dtype}.")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        rows[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(rows, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    for begin in range(0, raw.numel(), CHUNK_BYTES):
        yield raw[begin : begin + CHUNK_BYTES].cpu().numpy().data


def digest_of(path: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def what_is_wrong(path: Path, entry: FileEntry) -> str | None:
    """Why the file is not what the index says; None if it is. Reads all of it."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"{path}: expected {entry.size} bytes, got {size}"
        if digest_of(path) != entry.sha256:
            return f"{path}: its bytes are not those that were written (SHA-256 differs)"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


class TensorReader(Protocol):
    """Reads the tensors of one checkpoint, whatever its files are; ``Reader`` says how."""

    def read(self, file: str, name: str, begin: int, out: Tensor) -> None:
        """Fill ``out`` ``[K]`` with elements ``begin`` to ``begin + K`` of a tensor."""

    def read_whole(self, file: str, name: str, out: Tensor) -> None:
        """Fill ``out`` with a tensor of its shape."""

    def close(self) -> None:
        """Unmap everything."""


class Reader:
    """Reads ranges of the tensors of one folder; files stay mapped until ``close``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def read(self, file: str, name: str, begin: int, out: Tensor) -> None:
        """Fill ``out`` ``[K]`` with elements ``begin`` to ``begin + K`` of a tensor ``[N]``.

        Memory: ``CHUNK_BYTES``, whatever K is; pages of the file that are read may be dropped.
        """
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        source = self._open[file].get_slice(name)
        step = max(1, CHUNK_BYTES // out.element_size())
        for offset in range(0, out.numel(), step):
            part = out[offset : offset + step]
            part.copy_(source[begin + offset : begin + offset + part.numel()])

    def read_whole(self, file: str, name: str, out: Tensor) -> None:
        """Fill ``out`` with a tensor of its shape."""
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        out.copy_(self._open[file].get_tensor(name))

    def close(self) -> None:
        """Unmap everything."""
        self._open.clear()
