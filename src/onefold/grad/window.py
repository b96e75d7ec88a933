"""Station 2, keep or reduce. From: ``grad/hooks`` (a unit is ready). To: ``grad/reduce``.

A scope is a temporary change of placement: while one is open gradients stay Partial, on both axes
of the mesh or, with ``across="replicate"``, on the replicate axis alone. The outermost scope
decides what its end does: a ``GradWindow`` flushes, a ``NoSync`` leaves the gradients Partial.
Where *backward* runs decides, never where forward ran.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Literal

from onefold.errors import StateError


class Scope:
    """One with-block in which gradients are kept.

    Attributes:
        failure: why the scope is doomed, in words; None while all is well.
        keeps_units: gradients stay Partial on the shard axis, too, and parameters resident.
    """

    call = "scope"
    keeps_units = True

    def __init__(
        self,
        on_open: Callable[["Scope"], None],
        on_close: Callable[["Scope", BaseException | None], None],
    ) -> None:
        self.failure: str | None = None
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
        bytes_held: most bytes of full gradients and parameters it kept.
        exposed_ms: milliseconds this rank stood still for the wire.
        outcome: ``open``, ``flushed``, ``kept`` (nested, or gradients wait for step()) or
            ``aborted``.
    """

    call = "coalesce_grad_reduction()"

    def __init__(
        self,
        on_open: Callable[[Scope], None],
        on_close: Callable[[Scope, BaseException | None], None],
        declared_backwards: int | None,
        across: Literal["replicate"] | None = None,
    ) -> None:
        super().__init__(on_open, on_close)
        if across not in (None, "replicate"):
            raise ValueError(
                f"coalesce_grad_reduction(across=): expected 'replicate' or None, got {across!r}. "
                "Leave it out to defer the whole reduction."
            )
        if across is not None and declared_backwards is not None:
            raise ValueError(
                "coalesce_grad_reduction(across='replicate', backwards=n): with across= every "
                "backward reduces over the shard axis as it goes, so there is nothing to arm. "
                "Leave one of the two out."
            )
        self.keeps_units = across is None
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
    """The stack of open scopes of one engine, and the one question it answers."""

    def __init__(self) -> None:
        self._scopes: list[Scope] = []

    @property
    def outermost(self) -> Scope | None:
        """The scope whose end decides."""
        return self._scopes[0] if self._scopes else None

    @property
    def window(self) -> GradWindow | None:
        """The outermost scope if it is a window, that is, if its end flushes."""
        outermost = self.outermost
        return outermost if isinstance(outermost, GradWindow) else None

    def keeps(self) -> bool:
        """Whether a unit that is ready stays Partial on the shard axis."""
        return any(scope.keeps_units for scope in self._scopes)

    def crosses(self) -> bool:
        """Whether a unit that is ready is summed over the replicate axis, too."""
        return not self._scopes

    def ends_keeping(self, scope: Scope) -> bool:
        """Whether without ``scope``, the innermost, nothing keeps units any more."""
        return scope.keeps_units and not any(other.keeps_units for other in self._scopes[:-1])

    def push(self, scope: Scope) -> bool:
        """Open ``scope``; True if it is the first of the open ones that keeps units.

        Raises:
            StateError: the same scope object was opened before.
        """
        if scope.failure is not None or scope in self._scopes:
            raise StateError(
                f"{scope.call}: this scope was opened before; call {scope.call} again for a new one"
            )
        kept = self.keeps()
        self._scopes.append(scope)
        return self.keeps() and not kept

    def pop(self, scope: Scope) -> bool:
        """Close ``scope``; True if it was the outermost. A window's failure dooms the outermost."""
        assert self._scopes[-1] is scope, "with-blocks end in the opposite order of their beginning"
        self._scopes.pop()
        if self._scopes and isinstance(scope, GradWindow) and scope.failure is not None:
            outermost = self._scopes[0]
            outermost.failure = outermost.failure or scope.failure
        return not self._scopes
