"""Logging: one logger per module under ``onefold``, no handlers, nothing at import."""

import logging


def get_logger(module: str) -> logging.Logger:
    """The logger of one module; ``module`` is its ``__name__``."""
    return logging.getLogger(module)
