"""Plain data: Python values as JSON, and back, exactly; nothing is ever unpickled.

JSON has no tuples, no keys but strings, and no tensors. Each of these becomes an object with one
key that begins with "$".
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

MAX_TENSOR_NUMEL: Final = 1 << 16
"""A larger tensor is no setting, and belongs in a file of its own."""

_ATOMS: Final = (str, bool, int, float, type(None))


def encode(value: Any, where: str) -> Any:
    """``value`` in JSON's terms.

    Args:
        value: numbers, strings, None, lists, tuples, dicts, counters and small tensors of these.
        where: names the value in an error.

    Raises:
        TypeError: something in it is of another type; the message says where.
    """
    if type(value) in _ATOMS:
        return value
    if type(value) is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, Counter):
        return {"$counter": encode(dict(value), where)}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [list(pair) for pair in value.items()]
        return {"$dict": [encode(pair, f"{where}[{pair[0]!r}]") for pair in pairs]}
    if isinstance(value, Tensor) and value.numel() <= MAX_TENSOR_NUMEL:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$tensor": [dtype, list(value.shape), value.detach().flatten().tolist()]}
    raise TypeError(
        f"{where}: expected numbers, strings, lists, tuples, dicts or small tensors, got "
        f"{type(value).__name__}. A checkpoint holds data only."
    )


def decode(value: Any) -> Any:
    """What ``encode`` was given; tensors come back on the CPU."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag == "$tuple":
            return tuple(decode(item) for item in body)
        if tag == "$counter":
            return Counter(decode(body))
        if tag == "$dict":
            return {decode(key): decode(item) for key, item in body}
        if tag == "$tensor":
            dtype, shape, numbers = body
            return torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape)
    return {key: decode(item) for key, item in value.items()}


def check_json(value: Any, where: str) -> None:
    """Refuse what JSON would not give back as it is.

    Raises:
        TypeError: names the key.
    """
    if type(value) in _ATOMS:
        return
    if type(value) is list:
        for i, item in enumerate(value):
            check_json(item, f"{where}[{i}]")
        return
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(
                    f"{where}: expected string keys, got {key!r}. Write it as a string."
                )
            check_json(item, f"{where}[{key!r}]")
        return
    raise TypeError(
        f"{where}: expected what JSON has (numbers, strings, None, lists, dicts), got "
        f"{type(value).__name__}. Write it in these terms."
    )
