"""Failure: what the command reports to its user in one message, without a stack."""


class Failure(Exception):
    """The command cannot go on.

    Attributes:
        exit_code: 2 for bad input, 1 for everything else.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class BadInput(Failure):
    """The user can mend it: an option, a file, a missing extra."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=2)
