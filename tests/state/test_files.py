"""Files: safetensors that are written in a stream, with the checksum of what was written."""

import hashlib
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from onefold.state.files import CHUNK_BYTES, what_is_wrong, write_tensors


@pytest.mark.parametrize("starts", [True, False], ids=["apart", "in place"])
def test_checksum_and_content(tmp_path: Path, starts: bool) -> None:
    """Also where no thread can be started any more, as at the end of Python 3.12."""
    tensors = {
        "large": torch.arange(CHUNK_BYTES, dtype=torch.float32),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.5, dtype=torch.bfloat16),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    failing = patch.object(threading.Thread, "start", side_effect=RuntimeError)
    if starts:
        entry = write_tensors(tmp_path / "file", tensors)
    else:
        with failing:
            entry = write_tensors(tmp_path / "file", tensors)
    raw = (tmp_path / "file").read_bytes()
    assert entry.size == len(raw)
    assert entry.sha256 == hashlib.sha256(raw).hexdigest()
    assert what_is_wrong(tmp_path / "file", entry) is None
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert not any(t.name == "onefold-sha256" for t in threading.enumerate())


def test_a_dtype_that_the_format_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"no dtype torch\.complex64"):
        write_tensors(tmp_path / "file", {"x": torch.zeros(1, dtype=torch.complex64)})
