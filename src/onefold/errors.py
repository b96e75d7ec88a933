"""The exceptions onefold raises on purpose; bad arguments and settings are plain ``ValueError``."""


def describe(error: BaseException) -> str:
    """Type and text of an error, as it is told to other ranks."""
    return f"{type(error).__name__}: {error}"


class StateError(RuntimeError):
    """A call came in a state that does not allow it (for example ``step()`` inside a window)."""


class RankMismatchError(RuntimeError):
    """Ranks disagree about something that must be the same on all of them."""


class WindowAborted(RuntimeError):
    """A window was abandoned on every rank because its body failed on one of them.

    Everything accumulated since the last step is gone on all ranks; the next window starts clean.

    Attributes:
        rank: the rank (in the engine's data-parallel group) whose body failed first.
        reason: type and text of that rank's error.
        dropped_backwards: backwards of this rank whose gradients were dropped.
    """

    def __init__(self, rank: int, reason: str, dropped_backwards: int) -> None:
        self.rank = rank
        self.reason = reason
        self.dropped_backwards = dropped_backwards
        super().__init__(
            f"coalesce_grad_reduction(): the body failed on rank {rank} ({reason}), so the "
            f"gradients of {dropped_backwards} backward(s) on this rank were dropped, as on every "
            "rank. Run the step's backwards again in a new window before calling step()."
        )


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, is damaged, or is of another model."""
