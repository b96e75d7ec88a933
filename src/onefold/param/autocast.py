"""Autocast: the model's forward in a lower precision, its parameters as they are.

The settings' ``torch_autocast``. It covers calls of the model, through the engine or not, and not
calls of its submodules or of other methods.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Autocast:
    """Forward hooks that enter and leave ``torch.autocast`` around a model's forward.

    Args:
        module: the model.
        dtype: bfloat16 or float16; None for no autocast.
        device_type: of the parameters.

    Source: ``torch.autocast`` (torch.amp), as DeepSpeed's ``torch_autocast`` section uses it.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, device_type: str) -> None:
        self._handles: list[RemovableHandle] = []
        self._entered: list[torch.autocast] = []
        if dtype is None:
            return
        self._make = partial(torch.autocast, device_type, dtype)
        self._handles = [
            # Dynamo must run these hooks and not trace them; it guards on the state they leave.
            module.register_forward_pre_hook(torch.compiler.disable(self._enter)),
            module.register_forward_hook(torch.compiler.disable(self._leave), always_call=True),
        ]

    def detach(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        context: torch.autocast = self._make()
        context.__enter__()
        self._entered.append(context)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._entered:  # else a hook before ours raised
            self._entered.pop().__exit__(None, None, None)
