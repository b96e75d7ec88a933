"""CommLog: a witness of collectives that is independent of onefold's own ledger."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CommRecord(NamedTuple):
    """One operation of torch's c10d layer."""

    op: str  # torch's own name: "allreduce_", "_reduce_scatter_base_", "send", "recv_", ...
    largest_bytes: int  # of the largest tensor it takes: the full buffer of a collective


class CommLog(TorchDispatchMode):
    """Records what this thread sends inside the with-block, also from hooks within a CPU backward.

    Attributes:
        records: in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[CommRecord] = []

    @property
    def counts(self) -> Counter[str]:
        """How often each operation was called."""
        return Counter(record.op for record in self.records)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            largest = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
            self.records.append(CommRecord(func.overloadpacket.__name__, largest))
        return func(*args, **(kwargs or {}))
