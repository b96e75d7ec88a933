"""Station 2, keep or reduce. From: ``grad/hooks`` (a unit is ready). To: ``grad/reduce``.

A scope is a temporary change of placement: while one is open the gradients of the units that it
keeps stay Partial, on both axes of the mesh, and those of the others, on the replicate axis alone.
What is kept is data (``budget.py``): everything, or as much as ``max_bytes`` allows, or, with
``across="replicate"``, nothing. Where scopes nest, what any of them keeps is kept. The outermost
decides what its end does: a ``GradWindow`` flushes, a ``NoSync`` leaves the gradients Partial.
Where *backward* runs decides, never where forward ran.
"""

from collections.abc import Callable
from types import TracebackType

from onefold.budget import Kept
from onefold.errors import StateError
from onefold.unit import Unit


class Scope:
    """One with-block in which gradients are kept.

    Attributes:
        failure: why the scope is doomed, in words; None while all is well.
        kept: whose gradients stay Partial on the shard axis, too, and whose parameters unsharded.
    """

    call = "scope"

    def __init__(
        self,
        on_open: Callable[["Scope"], None],
        on_close: Callable[["Scope", BaseException | None], None],
        kept: Kept,
    ) -> None:
        self.failure: str | None = None
        self.kept = kept
        self._on_open = on_open
        self._on_close = on_close

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._on_close(self, error)


class NoSync(Scope):
    """The scope of ``engine.no_sync()``: its end sends nothing, and gradients stay Partial."""

    call = "no_sync()"

    def __enter__(self) -> None:
        self._on_open(self)


class GradWindow(Scope):
    """The scope of ``engine.coalesce_grad_reduction()``, and afterwards its report.

    Attributes:
        declared_backwards: how many backwards the caller said there would be, if it did.
        backwards: outermost backwards seen so far.
        collectives: data collectives started between its opening and its end, by kind.
        bytes_sent: bytes this rank sent in them.
        bytes_sent_per_backward: what the same backwards would have sent without the window.
        bytes_held: bytes of full gradients and parameters it kept, and of sums that wait for its
            end; what only passes through is not among them.
        exposed_ms: milliseconds this rank stood still for the wire.
        outcome: ``open``, ``flushed``, ``kept`` (nested, or gradients wait for step()) or
            ``aborted``.
    """

    call = "coalesce_grad_reduction()"

    def __init__(
        self,
        on_open: Callable[[Scope], None],
        on_close: Callable[[Scope, BaseException | None], None],
        kept: Kept,
        declared_backwards: int | None,
    ) -> None:
        super().__init__(on_open, on_close, kept)
        if declared_backwards is not None and declared_backwards < 1:
            raise ValueError(
                f"coalesce_grad_reduction(backwards=): expected at least 1, got "
                f"{declared_backwards}. Leave it out when the number is unknown."
            )
        self.declared_backwards = declared_backwards
        self.backwards = 0
        self.collectives: dict[str, int] = {}
        self.bytes_sent = 0
        self.bytes_sent_per_backward = 0
        self.bytes_held = 0
        self.exposed_ms = 0.0
        self.outcome = "open"

    def __enter__(self) -> "GradWindow":
        self._on_open(self)
        return self

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.collectives.items()))
        mib = 1 << 20
        return (
            f"window {self.outcome}: {self.backwards} backward(s), {kinds or 'no collectives'}, "
            f"{self.bytes_sent / mib:.1f} MiB sent instead of "
            f"{self.bytes_sent_per_backward / mib:.1f}, {self.bytes_held / mib:.1f} MiB held, "
            f"{self.exposed_ms:.1f} ms exposed"
        )


class Keeper:
    """The stack of open scopes of one engine, and the one question it answers.

    Attributes:
        blocks: blocks whose parameters some open scope keeps.
        units: units whose gradients some open scope keeps.
    """

    def __init__(self) -> None:
        self._scopes: list[Scope] = []
        self.blocks: frozenset[int] = frozenset()
        self.units: frozenset[int] = frozenset()

    @property
    def outermost(self) -> Scope | None:
        """The scope whose end decides."""
        return self._scopes[0] if self._scopes else None

    @property
    def window(self) -> GradWindow | None:
        """The outermost scope if it is a window, that is, if its end flushes."""
        outermost = self.outermost
        return outermost if isinstance(outermost, GradWindow) else None

    def keeps(self, unit: Unit) -> bool:
        """Whether ``unit``, when it is ready, stays Partial on the shard axis."""
        return unit.index in self.units

    def crosses(self, unit: Unit) -> bool:
        """Whether ``unit``, which leaves as it is ready, is summed over the replicate axis, too."""
        return not self._scopes or unit.spec.num_replicas == 1

    def kept_only_by(self, scope: Scope) -> frozenset[int]:
        """The blocks whose parameters ``scope``, the innermost, keeps and no other does."""
        return scope.kept.blocks.difference(*(other.kept.blocks for other in self._scopes[:-1]))

    def push(self, scope: Scope) -> None:
        """Open ``scope``.

        Raises:
            StateError: the same scope object was opened before.
        """
        if scope.failure is not None or scope in self._scopes:
            raise StateError(
                f"{scope.call}: this scope was opened before; call {scope.call} again for a new one"
            )
        self._scopes.append(scope)
        self._unite()

    def pop(self, scope: Scope) -> bool:
        """Close ``scope``; True if it was the outermost. A window's failure dooms the outermost."""
        assert self._scopes[-1] is scope, "with-blocks end in the opposite order of their beginning"
        self._scopes.pop()
        self._unite()
        if self._scopes and isinstance(scope, GradWindow) and scope.failure is not None:
            outermost = self._scopes[0]
            outermost.failure = outermost.failure or scope.failure
        return not self._scopes

    def _unite(self) -> None:
        self.blocks = frozenset().union(*(scope.kept.blocks for scope in self._scopes))
        self.units = frozenset().union(*(scope.kept.units for scope in self._scopes))
