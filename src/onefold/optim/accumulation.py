"""The accumulation boundary: which ``step()`` steps, and what the sum is divided by.

A micro-step ends with a call of ``step()``. With ``gradient_accumulation_steps`` = k > 1 every k-th
call is a boundary; the flag of ``set_gradient_accumulation_boundary`` overrides the count for one
call. The divisor is W times the micro-steps really taken, applied once.
"""

from onefold.errors import StateError


class Accumulation:
    """Counts micro-steps between two steps.

    Args:
        steps: k, or None where the caller decides every boundary.
        num_ranks: what a mean over ranks divides by; 1 for a sum.
    """

    def __init__(self, steps: int | None, num_ranks: int) -> None:
        self.steps = steps if steps is not None and steps > 1 else None
        self.is_declared = steps is not None
        self._num_ranks = num_ranks
        self._taken = 0
        self._flag: bool | None = None
        self._scales: bool | None = None

    def set_boundary(self, flag: bool) -> None:
        """Decide the next ``step()`` by hand."""
        self._flag = flag

    @property
    def is_marked(self) -> bool:
        """The caller said that the next backward is the last."""
        return self._flag is True

    @property
    def is_boundary(self) -> bool:
        """The next ``step()`` will step."""
        if self._flag is not None:
            return self._flag
        return self.steps is None or self._taken + 1 >= self.steps

    def note_backward(self, scale_wrt_gas: bool) -> None:
        """A backward of ``engine.backward`` begins.

        Raises:
            StateError: both settings of ``scale_wrt_gas`` in one step.
        """
        if self._scales is not None and self._scales != scale_wrt_gas:
            raise StateError(
                f"backward(scale_wrt_gas={scale_wrt_gas}): another backward of this step said "
                f"{self._scales}, and the sum is divided once. Use one value for all backwards "
                "between two steps."
            )
        self._scales = scale_wrt_gas

    @property
    def divisor(self) -> float:
        """What the sum over ranks and micro-steps is divided by."""
        averages = self.steps is not None and self._scales is not False
        return float(self._num_ranks * (self._taken + 1 if averages else 1))

    def count(self) -> None:
        """A micro-step off the boundary has ended."""
        self._taken += 1
        self._flag = None

    def drop(self) -> None:
        """The gradients were dropped. Micro-steps that were taken stay taken: the loop goes on."""
        self._scales = None

    def restart(self) -> None:
        """The step begins again, because a window was aborted on all ranks."""
        self.drop()
        self._taken = 0

    def end_step(self) -> None:
        """The gradients were stepped on."""
        self.restart()
        self._flag = None
