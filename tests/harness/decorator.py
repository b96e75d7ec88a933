"""The decorator that turns a body run on every rank into a pytest test."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.harness.pool import WorkerError, pool_for


def distributed(
    *,
    world_size: int | Sequence[int] = 2,
    timeout_s: float | None = None,
    check: Callable[[list[Any]], None] | None = None,
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run the decorated body on every rank of the pool of each world size.

    The body is a module-level function whose first parameter is ``ctx``. Its other parameters are
    parametrized or are fixtures, as in any test; they are evaluated in pytest's process and must
    pickle. A rank may call ``pytest.skip``, if all ranks do.

    Args:
        world_size: number of ranks, or several numbers to parametrize over.
        timeout_s: deadline of one call; the pool's own (60 s) if None.
        check: called in pytest's process with the bodies' return values in rank order.
    """
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        first, *others = inspect.signature(body).parameters.values()
        if first.name != "ctx" or any(other.name == "world_size" for other in others):
            raise TypeError(
                f"@distributed: {body.__qualname__} must take ctx first, and no world_size: "
                "use ctx.world_size."
            )

        @functools.wraps(body)
        def test(world_size: int, **kwargs: Any) -> None:
            __tracebackhide__ = True
            pool = pool_for(world_size)
            try:
                results = pool.run_within(timeout_s or pool.timeout_s, body, **kwargs)
            except WorkerError as error:
                # Without a traceback of this process, which says nothing about the failure.
                failure = str(error)
            else:
                if check is not None:
                    check(results)
                return
            pytest.fail(failure, pytrace=False)

        own = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([own, *others])  # type: ignore[attr-defined]
        test.rank_body = body  # type: ignore[attr-defined]
        ids = [f"w{size}" for size in sizes]
        return pytest.mark.parametrize("world_size", sizes, ids=ids)(test)

    return decorate
