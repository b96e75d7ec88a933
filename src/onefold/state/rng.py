"""Random number generators of one rank: torch's (CPU and accelerator), Python's and numpy's."""

import base64
import random
import sys
from typing import Any

import torch
from torch import Tensor


def capture(device: torch.device) -> dict[str, Any]:
    """All states, in JSON's terms; numpy's only if something has imported numpy."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, _text(torch.tensor(numbers)), gauss],
    }
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        words = torch.from_numpy(keys.astype("int64"))
        states["numpy"] = [kind, _text(words), int(position), int(has_gauss), float(cached)]
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Set what was captured and is here."""
    torch.set_rng_state(_bytes(states["torch"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(_words(numbers)), gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_bytes(states["cuda"]), device)
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        kind, words, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(_words(words), dtype="uint32"), *rest))


def _text(numbers: Tensor) -> str:
    return base64.b64encode(numbers.contiguous().view(torch.uint8).numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _words(text: str) -> list[int]:
    words: list[int] = _bytes(text).view(torch.int64).tolist()
    return words
