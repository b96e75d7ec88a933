"""Names: what ``module.state_dict()`` calls parameters and buffers; one may have several."""

from torch import Tensor, nn


def names_of(module: nn.Module) -> dict[str, str]:
    """Every name that ``module.state_dict()`` has, and the first name of the tensor behind it."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None and name not in child._non_persistent_buffers_set:
                names[dot + name] = first.setdefault(id(tensor), dot + name)
    return names


def tied_names(module: nn.Module) -> dict[str, str]:
    """The further names of parameters and persistent buffers, and the first name of each."""
    return {name: first for name, first in names_of(module).items() if name != first}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that ``state_dict()`` has, by first name."""
    kept = set(names_of(module).values())
    every = module.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in every if name in kept}
