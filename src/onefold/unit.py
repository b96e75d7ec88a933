"""Unit: parameters of one block that travel as one flat buffer, and the states they are in.

Legend: W size of the shard axis, N padded elements of the unit, S = N / W, P parameters.

| buffer        | shape | dtype        | lives                                                   |
|---------------|-------|--------------|---------------------------------------------------------|
| `param_full`  | [N]   | model        | always where parameters are Replicate; else while held  |
| `param_shard` | [S]   | model        | always; a view of `param_full` where that is Replicate  |
| `grad_full`   | [N]   | accumulation | Partial: from bind (first gradient) to the reduction    |
| `grad_shard`  | [S]   | master       | from the first reduction to the step                    |
| `master`      | [S]   | fp32 / fp64  | always, if trainable; `param_shard` itself where dtype  |
|               |       |              | and memory are the same                                 |

`master` and `grad_shard` are in host memory where the optimizer is offloaded, `param_shard` where
the parameters are. The parameter half is here, the gradient half in ``gradients.py``.

| parameters are | `param.data` is                          | moves                              |
|----------------|------------------------------------------|------------------------------------|
| sharded        | one NaN expanded to the shape            | start_unshard -> unsharding        |
| unsharding     | the same                                 | finish_unshard -> unsharded        |
| unsharded      | a view of `param_full`, own strides      | reshard (no holds left) -> sharded |
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onefold.errors import StateError
from onefold.gradients import Gradients
from onefold.wire.buffer import Arena, empty, refill
from onefold.wire.collectives import Collectives, Handle
from onefold.wire.grid import ReduceGroup
from onefold.wire.layout import FlatLayout, Piece
from onefold.wire.placements import Placements


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in its unit. ``param`` is the user's own object."""

    name: str
    """Its first name in ``named_parameters`` order; tied parameters live once."""
    param: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    """Its own dense strides, kept in every view (channels_last, transposed)."""


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What the plan decided about one unit."""

    index: int
    """Its place in the plan: the order in which units are reduced."""
    name: str
    slots: tuple[Slot, ...]
    layout: FlatLayout
    dtype: torch.dtype
    """Of the parameters as forward reads them."""
    accumulation_dtype: torch.dtype
    """In which backwards are added."""
    wire_dtype: torch.dtype
    """In which gradients travel."""
    device: torch.device
    is_trainable: bool
    home: Placements
    reduce_group: ReduceGroup
    num_replicas: int
    """R: the size of the replicate axis its gradients are summed over."""
    offloads_optimizer: bool
    """``master`` and ``grad_shard`` are in host memory."""
    offloads_parameters: bool
    """``param_shard`` is in host memory."""

    @property
    def master_dtype(self) -> torch.dtype:
        """Fp32 or wider."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def has_own_master(self) -> bool:
        """The master is another memory than ``param_shard``."""
        same_memory = self.offloads_optimizer == self.offloads_parameters
        return self.is_trainable and not (same_memory and self.dtype == self.master_dtype)


class Unit:
    """One unit's buffers and legal moves. Built by the engine from a ``UnitSpec``.

    Attributes:
        wire: the collectives of its reduce group.
        master: ``[S]``, what the optimizer updates; ``param_shard`` where nothing else is needed.
    """

    def __init__(
        self, spec: UnitSpec, collectives: Collectives, arena: Arena, host_arena: Arena
    ) -> None:
        self.spec = spec
        self.index = spec.index
        self.name = spec.name
        self.slots = spec.slots
        self.params: tuple[nn.Parameter, ...] = tuple(slot.param for slot in spec.slots)
        self.layout = spec.layout
        self.shard_rank = collectives.mesh.shard.rank
        self.frees_parameters = spec.home.shards_parameters
        self.holds = 0
        self.is_unsharded = False
        self.wire = collectives
        self._host_arena = host_arena
        self._gather: Handle | None = None
        self._left_versions: list[int] = []
        self._graph_versions: list[int] = []  # see _free
        self._nothing = float("nan") if spec.dtype.is_floating_point else 0
        self._freed = torch.full((), self._nothing, dtype=spec.dtype, device=spec.device)
        self.param_full = torch.empty(self.layout.numel, dtype=spec.dtype, device=spec.device)
        self.views = self.views_of(self.param_full)
        self.param_shard = self.param_full[self._own_slice]
        self.master = self.param_shard
        self.param_full.untyped_storage().resize_(0)  # until allocate(): units are placed in turn
        shard_arena = host_arena if spec.offloads_optimizer else arena
        self.gradients = Gradients(spec, self.views_of, arena, shard_arena, self.shard_rank)

    @property
    def _own_slice(self) -> slice:
        begin = self.shard_rank * self.layout.shard_numel
        return slice(begin, begin + self.layout.shard_numel)

    @property
    def full_bytes(self) -> int:
        """Bytes of ``param_full`` while it is filled."""
        return self.layout.numel * self.spec.dtype.itemsize

    def piece(self, index: int) -> Piece:
        """This rank's part of parameter ``index``."""
        return self.layout.piece(index, self.shard_rank)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat`` ``[N]`` in the shapes and strides of the parameters."""
        begin = flat.storage_offset()  # as_strided counts from the start of the storage
        return [
            flat.as_strided(slot.size, slot.stride, begin + offset)
            for slot, offset in zip(self.slots, self.layout.offsets, strict=True)
        ]

    def allocate(self) -> None:
        """Give ``param_full`` its memory, zeroed, before the first values are written into it."""
        if not self.param_full.untyped_storage().nbytes():
            refill(self.param_full)
            self.param_full.zero_()

    def place(self) -> None:
        """Take the parameters over: rank 0's values win, and everything goes to its home.

        Communication: one broadcast of N elements.
        Memory: N elements; where parameters are Shard all but S of them are freed again.
        """
        self.allocate()
        values = self.param_full
        if self.spec.is_trainable and self.spec.dtype != self.spec.master_dtype:
            # The master starts from the values before they are rounded to the model's dtype.
            values = torch.zeros_like(self.param_full, dtype=self.spec.master_dtype)
        for slot, view in zip(self.slots, self.views_of(values), strict=True):
            view.copy_(slot.param.detach())
        self.settle_home(values)

    def settle_home(self, values: Tensor | None = None) -> None:
        """Send rank 0's ``values`` ``[N]``, by default those in ``param_full``, and go home."""
        values = self.param_full if values is None else values
        self.wire.broadcast(values, self.name)
        if values is not self.param_full:
            self.param_full.copy_(values)
        self.is_unsharded = True
        self._point_at(self.views)
        if self.frees_parameters:
            own = self.param_full[self._own_slice]
            self.param_shard = self._kept(own, self.spec.offloads_parameters, self.spec.dtype)
        self.master = self.param_shard
        if self.spec.has_own_master:
            own = values[self._own_slice]
            self.master = self._kept(own, self.spec.offloads_optimizer, self.spec.master_dtype)
        if self.spec.is_trainable:
            self.gradients.adopt()
        if self.frees_parameters:
            self._free()

    def _kept(self, own: Tensor, is_on_host: bool, dtype: torch.dtype) -> Tensor:
        """A copy of ``own`` that stays for the engine's life."""
        if not is_on_host:
            return own.to(dtype, copy=True)
        kept = self._host_arena.allocate(own.numel(), dtype)
        return kept.copy_(own)

    # -- parameters: sharded, unsharding, unsharded ------------------------------------------

    def start_unshard(self) -> None:
        """Start gathering the parameters; nothing to do where they are here or on their way.

        Raises:
            StateError: somebody wrote into a parameter while it was freed.

        Communication: one all-gather, (W-1)/W * N * itemsize bytes out and in.
        Memory: N elements until ``reshard``.
        """
        if self.is_unsharded or self._gather is not None:
            return
        self._check_not_lost()
        # The storage object stays the same for ever: views that autograd saved before it was
        # emptied (a transposed weight) are valid again once it is filled.
        refill(self.param_full)
        shard = self.param_shard
        if self.spec.offloads_parameters:  # in its place, from where it is sent
            shard = self.param_full[self._own_slice].copy_(shard, non_blocking=True)
        self._gather = self.wire.start_all_gather(shard, self.param_full, self.index, self.name)

    def finish_unshard(self) -> None:
        """Wait for the parameters and make them readable."""
        if self.is_unsharded:
            return
        self.start_unshard()
        gather, self._gather = self._gather, None
        assert gather is not None
        gather.wait()
        self.is_unsharded = True
        _set_versions(self.params, self._graph_versions)
        self._point_at(self.views)

    def hold(self) -> None:
        """Parameters are needed; they stay unsharded until as many ``release`` calls."""
        self.holds += 1
        if not self.is_unsharded:
            self.finish_unshard()

    def release(self) -> None:
        """End one hold; the last one frees the parameters where their home is Shard."""
        self.holds -= 1
        assert self.holds >= 0, f"unit {self.name} was released more often than held"
        if self.holds == 0:
            self.reshard()

    def reshard(self) -> None:
        """Free the parameters unless somebody holds them, or their home is Replicate."""
        if not self.frees_parameters or self.holds:
            return
        if self._gather is not None:
            self.finish_unshard()  # gathered ahead and never used
        if self.is_unsharded:
            if self.was_written():
                self.keep_writes()
            self._free()

    def gather(self, shard: Tensor) -> Tensor:
        """A new ``[N]`` that holds every rank's ``shard`` ``[S]``, for reading."""
        flat = torch.empty(self.layout.numel, dtype=shard.dtype, device=self.spec.device)
        shard = shard.to(self.spec.device)
        self.wire.start_all_gather(shard, flat, self.index, f"{self.name} (read)").wait()
        return flat

    def was_written(self) -> bool:
        """Somebody wrote into a parameter in place since the engine last looked."""
        return any(
            param._version != left
            for param, left in zip(self.params, self._left_versions, strict=True)
        )

    def keep_writes(self) -> None:
        """Copy this rank's slice of the parameters into the master, where it was changed."""
        own = self.param_full[self._own_slice]
        if own.data_ptr() != self.param_shard.data_ptr():
            self.param_shard.copy_(own)
        if self.spec.has_own_master:
            written = own.to(self.master.device)
            # What nobody changed keeps the bits that the model's dtype has no room for.
            is_same = self.master.to(self.spec.dtype) == written
            self.master.copy_(torch.where(is_same, self.master, written.to(self.master.dtype)))
        self._left_versions = [param._version for param in self.params]

    def start_publish(self) -> Handle | None:
        """Bring the stepped master to where forward reads it; the caller waits for the handle.

        Communication: where parameters are Replicate over a shard axis one all-gather,
            (W-1)/W * N * itemsize bytes out and in.
        """
        if self.spec.has_own_master:
            self.param_shard.copy_(self.master, non_blocking=True)
        if self.frees_parameters:
            return None
        return self.wire.start_all_gather(self.param_shard, self.param_full, self.index, self.name)

    def publish_version(self) -> None:
        """The parameters have new values: a backward on an older graph must raise, as in torch."""
        torch.autograd.graph.increment_version(self.params)
        self._graph_versions = [version + 1 for version in self._graph_versions]
        self._left_versions = [param._version for param in self.params]

    def check_storage(self) -> None:
        """Refuse parameters whose storage somebody replaced.

        Raises:
            StateError: ``.to()``, ``.half()`` or an assignment to ``.data`` moved a parameter out
                of its unit.
        """
        self._check_not_lost()
        here = self.views if self.is_unsharded else None
        for index, slot in enumerate(self.slots):
            expected = (here[index] if here else self._freed).data_ptr()
            if slot.param.numel() and slot.param.data_ptr() != expected:
                raise StateError(
                    f"step(): the storage of parameter {slot.name} was replaced after initialize() "
                    "(by .to(), .half() or an assignment to .data), so the engine would step "
                    "weights that the module no longer reads. Convert the model before initialize()"
                    " and write in place."
                )

    def _check_not_lost(self) -> None:
        """Refuse writes into freed parameters, as far as torch let them pass."""
        if not self.frees_parameters or self.is_unsharded or not self.was_written():
            return
        names = [
            slot.name
            for slot, left in zip(self.slots, self._left_versions, strict=True)
            if slot.param._version != left
        ]
        self._freed.fill_(self._nothing)
        self._left_versions = [param._version for param in self.params]
        raise StateError(
            f"parameter {names[0]} was written while it was sharded, so the write is lost on rank "
            f"{self.shard_rank}. Write inside 'with engine.full_parameters():', on every rank."
        )

    def _free(self) -> None:
        self.is_unsharded = False
        # Another version while freed: a backward that comes here past our hooks raises in torch,
        # instead of reading memory that is gone.
        self._graph_versions = [param._version for param in self.params]
        torch.autograd.graph.increment_version(self.params)
        self._point_at([self._freed.expand(slot.size) for slot in self.slots])
        if self.param_full.untyped_storage().resizable():
            empty(self.param_full, len(self.views), self._nothing)
        else:  # somebody made a numpy array of a parameter; that array keeps the old memory
            self.param_full = torch.empty_like(self.param_full)
            self.views = self.views_of(self.param_full)
            self.param_full.untyped_storage().resize_(0)

    def _point_at(self, tensors: Sequence[Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor
        self._left_versions = [param._version for param in self.params]


def _set_versions(params: Sequence[nn.Parameter], versions: Sequence[int]) -> None:
    # What torch.autograd._unsafe_preserve_version_counter does at the end of its with-block.
    torch._C._autograd._unsafe_set_version_counter(tuple(params), tuple(versions))
