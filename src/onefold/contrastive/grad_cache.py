"""GradCache: a contrastive step whose batch is larger than what fits, exact, with one reduction.

    encode in chunks without graphs -> gather the embeddings of all ranks -> loss once, down to the
    embeddings -> encode chunk by chunk again, each with its backward -> one reduction per unit

Legend: W ranks with m rows each (they may differ), B rows in all, columns of data (anchors,
positives, ...), each cut into chunks.

Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
arXiv:2101.06983. What is added here: the negatives of all ranks, chunk counts that differ between
ranks, and failures that reach every rank.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onefold.contrastive.chunks import Column, Moment, Rows, State, cut, num_rows, take_rows
from onefold.contrastive.gather import Share, gather_rows, return_gradients, split_columns
from onefold.contrastive.losses import ContrastiveLoss
from onefold.engine import Engine
from onefold.errors import RankMismatchError, describe

Encoder = Callable[..., Tensor]


class _Chunk(NamedTuple):
    """One chunk after it was encoded the first time."""

    rows: Rows
    state: State
    embedding: Tensor
    """``[k, D]``; with its graph if that is kept."""


class _Gradients(NamedTuple):
    loss: Tensor
    by_column: list[Tensor]


class GradCache:
    """The contrastive step of one engine, or of one per column.

    Args:
        engines: one engine; or one per column, where columns have towers of their own.
        loss: a ``ContrastiveLoss``, of which each rank computes its rows; or any callable of the
            columns' embeddings ``[B, D]``, the same on all ranks, which every rank computes whole.
            Parameters in it are trained if they are in an engine's module.
        encoders: from a chunk to its embeddings ``[k, D]``; one, or one per column: modules, which
            get mappings as keywords, or functions. By default the engines themselves. A module
            without trainable parameters is not called twice.
        mini_batch_size: rows of a chunk; or
        mini_batch_tokens: the most that rows x longest row of a chunk may be.
        keep_graphs: of how many chunks, the last ones, the graph is kept, so that they are encoded
            once. Costs their activations.
        mask: for ``mini_batch_tokens``, the input whose row sums are the rows' lengths.

    Raises:
        ValueError: not exactly one of the sizes; or not one engine or encoder per column.
    Communication: on construction, group creation; every rank makes it.
    """

    def __init__(  # noqa: PLR0913 (each is a decision of the user)
        self,
        engines: Engine | Sequence[Engine],
        loss: ContrastiveLoss | Callable[..., Tensor],
        *,
        encoders: Encoder | Sequence[Encoder] | None = None,
        mini_batch_size: int | None = None,
        mini_batch_tokens: int | None = None,
        keep_graphs: int = 0,
        mask: str = "attention_mask",
    ) -> None:
        sizes = [size for size in (mini_batch_size, mini_batch_tokens) if size is not None]
        if len(sizes) != 1 or sizes[0] < 1 or keep_graphs < 0:
            raise ValueError(
                f"GradCache(mini_batch_size={mini_batch_size}, mini_batch_tokens="
                f"{mini_batch_tokens}, keep_graphs={keep_graphs}): expected one of the sizes, 1 or "
                "above, and keep_graphs of 0 or above."
            )
        self._engines = [engines] if isinstance(engines, Engine) else list(engines)
        self._encoders = _encoders_of(self._engines, encoders)
        self._loss = loss
        self._size, self._tokens, self._mask = mini_batch_size, mini_batch_tokens, mask
        self._keep_graphs = keep_graphs
        first = self._engines[0]
        self._exchange = first.parts.connect()
        self._control = first.parts.world.control
        # Modules may be shared between engines of one list; each engine has one window.
        self._distinct = list(dict.fromkeys(self._engines))
        self._moment = Moment([engine.module for engine in self._distinct], first.device)

    def __call__(self, *columns: Column, **options: Any) -> Tensor:
        """Forward and backward of one whole batch; ``engine.step()`` is the caller's.

        Args:
            columns: this rank's rows of every column: tensors, mappings of tensors, or lists.
            options: for the loss; ``ids``, this rank's ``[m]`` or ``[m, C - 1]``, are gathered.

        Returns:
            The loss of the whole batch, a detached scalar, the same on every rank.

        Raises:
            ValueError: not one encoder per column, columns of different lengths, or no rows.
            RankMismatchError: ranks have different numbers of columns, or not all have ids.
            WindowAborted: another rank has failed; the step's gradients are dropped on all ranks.
        Communication: that of one window; per column two all-to-alls (one for a callable loss);
            two exchanges on the control group.
        Memory: the embeddings of the whole batch, and one chunk's activations (more with
            ``keep_graphs``).
        """
        with ExitStack() as windows:
            for engine in self._distinct:
                windows.enter_context(engine.coalesce_grad_reduction())
            chunks, own, failure = self._encode_all(columns, options)
            with self._moment.kept():
                found = self._loss_and_gradients(own, failure, options)
                if found is not None:  # else a window's end raises, because a rank has failed
                    self._replay(columns, chunks, found.by_column)
        assert found is not None
        return found.loss

    # -- first pass ----------------------------------------------------------------------------

    def _encode_all(
        self, columns: Sequence[Column], options: dict[str, Any]
    ) -> tuple[list[_Chunk], list[Tensor], Exception | None]:
        """Every chunk, and the columns' embeddings ``[m, D]``, wide, without graphs.

        An error is returned, because other ranks wait for these.
        """
        chunks: list[_Chunk] = []
        try:
            self._check(columns, options)
            ranges = cut(columns, self._size, self._tokens, self._mask)
            for number, rows in enumerate(ranges):
                state = self._moment.now()
                with torch.set_grad_enabled(number >= len(ranges) - self._keep_graphs):
                    embedding = self._encode(columns, rows)
                chunks.append(_Chunk(rows, state, embedding))
            wide = [_widened(chunk.embedding.detach()) for chunk in chunks]
            counts = [sum(r.column == column for r in ranges) for column in range(len(columns))]
            return chunks, split_columns(wide, counts), None
        except Exception as error:
            return chunks, [], error

    def _check(self, columns: Sequence[Column], options: dict[str, Any]) -> None:
        if len(self._encoders) not in (1, len(columns)):
            raise ValueError(
                f"GradCache: expected one encoder or {len(columns)}, one per column, got "
                f"{len(self._encoders)}."
            )
        sizes = [num_rows(column) for column in columns]
        if (ids := options.get("ids")) is not None:
            sizes.append(len(ids))
        if len(set(sizes)) != 1 or sizes[0] < 1:
            raise ValueError(
                f"GradCache: expected columns (and ids) of equally many rows, 1 or more, got "
                f"{sizes} on rank {self._control.rank}. Row i of each belongs to pair i."
            )

    def _encode(self, columns: Sequence[Column], rows: Rows) -> Tensor:
        embedding = self._encoder_of(rows.column).encode(take_rows(columns[rows.column], rows))
        if embedding.dim() != 2 or len(embedding) != rows.end - rows.begin:
            raise ValueError(
                f"GradCache: expected embeddings of shape [{rows.end - rows.begin}, D] from the "
                f"encoder of column {rows.column}, got {tuple(embedding.shape)}. Pass encoders= "
                "that pool and return one vector per row."
            )
        return embedding

    # -- loss ----------------------------------------------------------------------------------

    def _loss_and_gradients(
        self, own: Sequence[Tensor], failure: Exception | None, options: dict[str, Any]
    ) -> "_Gradients | None":
        """The loss down to this rank's embeddings; None if another rank has failed.

        The gradients are such that the engines' own division makes the result that of one process.
        """
        control, ids = self._control, options.get("ids")
        kind = [len(own), None if ids is None else ids.shape[1:]]
        size = len(own[0]) if own else 0
        told = control.gather((describe(failure) if failure else None, size, kind))
        if _has_failed(failure, [text for text, _, _ in told]):
            return None
        if any(theirs != kind for _, _, theirs in told):
            raise RankMismatchError(
                "GradCache: expected as many columns, and ids of the same kind, on every rank, got "
                f"{[theirs for _, _, theirs in told]} in rank order."
            )
        share = Share(tuple(size for _, size, _ in told), control.rank)
        if ids is not None:
            whole = gather_rows(self._exchange, ids.reshape(len(ids), -1), share)
            options = options | {"ids": whole.reshape(-1, *ids.shape[1:])}
        found: _Gradients | None = None
        try:
            found = self._of_all(own, share, options)
        except Exception as error:
            failure = error
        if _has_failed(failure, control.gather(describe(failure) if failure else None)):
            return None
        assert found is not None
        return self._of_own(found, own, share)

    def _of_all(self, own: Sequence[Tensor], share: Share, options: dict[str, Any]) -> "_Gradients":
        """This rank's summand of the loss, down to everybody's embeddings ``[B, D]``."""
        loss, engine = self._loss, self._engines[0]
        everything = [self._gathered(column, rows, share) for column, rows in enumerate(own)]
        factor = float(engine.parts.mean_over)
        if isinstance(loss, ContrastiveLoss):
            for rows in own:
                rows.requires_grad_()
            value = loss.partial(own, everything, share.first, **options)
        else:
            value = loss(*everything, **options)
            factor /= self._control.size
        engine.scale(value * factor).backward()
        return _Gradients(value.detach().double().cpu(), [_grad(whole) for whole in everything])

    def _gathered(self, column: int, rows: Tensor, share: Share) -> Tensor:
        if self._is_local(column):
            return rows.new_zeros(1, 1).expand(sum(share.sizes), rows.shape[1])
        return gather_rows(self._exchange, rows, share).requires_grad_()

    def _is_local(self, column: int) -> bool:
        """Whether no other rank's loss depends on the column."""
        loss = self._loss
        return isinstance(loss, ContrastiveLoss) and column == 0 and not loss.needs_all_anchors

    def _of_own(self, found: "_Gradients", own: Sequence[Tensor], share: Share) -> "_Gradients":
        """The gradients of this rank's rows, and the loss of the whole batch."""
        scale = self._engines[0].loss_scaler.scale
        if not isinstance(self._loss, ContrastiveLoss):
            ratio, rows_of = self._control.size / scale, slice(share.first, share.end)
            return _Gradients(found.loss, [whole[rows_of] * ratio for whole in found.by_column])
        by_column = []
        for column, (rows, whole) in enumerate(zip(own, found.by_column, strict=True)):
            gradient = _grad(rows)
            if not self._is_local(column):
                gradient = gradient + return_gradients(self._exchange, whole, share)
            by_column.append(gradient / scale)
        loss = self._control.gather_floats([float(found.loss)]).sum()
        return _Gradients(loss, by_column)

    # -- second pass ---------------------------------------------------------------------------

    def _replay(
        self, columns: Sequence[Column], chunks: list[_Chunk], gradients: Sequence[Tensor]
    ) -> None:
        """One backward per chunk; those whose graph was kept come first, and are freed."""
        while chunks:
            rows, state, embedding = chunks.pop()
            if not embedding.requires_grad and self._encoder_of(rows.column).is_trained():
                self._moment.restore(state)
                embedding = self._encode(columns, rows)
            if not embedding.requires_grad:
                continue  # nothing in this chunk is trained
            gradient = gradients[rows.column][rows.begin : rows.end]
            surrogate = (_widened(embedding) * gradient).sum()
            self._engine_of(rows.column).backward(surrogate)

    def _encoder_of(self, column: int) -> "_Encoder":
        return self._encoders[column if len(self._encoders) > 1 else 0]

    def _engine_of(self, column: int) -> Engine:
        return self._engines[column if len(self._engines) > 1 else 0]


class _Encoder:
    """Makes embeddings of chunks."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._module: nn.Module | None = None
        if isinstance(encoder, Engine):
            self._module = encoder.module
        elif isinstance(encoder, nn.Module):
            self._module = encoder

    def encode(self, chunk: Any) -> Tensor:
        """``[k, D]``."""
        if self._module is not None and isinstance(chunk, dict):
            return self._encoder(**chunk)
        return self._encoder(chunk)

    def is_trained(self) -> bool:
        """Whether encoding with a graph may give one; a function might always."""
        return self._module is None or any(p.requires_grad for p in self._module.parameters())


def _encoders_of(
    engines: Sequence[Engine], encoders: Encoder | Sequence[Encoder] | None
) -> list[_Encoder]:
    if encoders is None:
        return [_Encoder(engine) for engine in engines]
    found = [encoders] if callable(encoders) else list(encoders)
    if len(engines) > 1 and len(found) != len(engines):
        raise ValueError(
            f"GradCache: expected as many encoders as engines, got {len(found)} and {len(engines)}."
        )
    return [_Encoder(encoder) for encoder in found]


def _has_failed(own: Exception | None, told: Sequence[str | None]) -> bool:
    """Whether another rank has; this one's own error is raised."""
    if own is not None:
        raise own
    return any(text is not None for text in told)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
