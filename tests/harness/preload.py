"""Imported once by the fork server, so that every worker starts with these modules in memory.

No tensor operation may run here: OpenMP's threads do not survive a fork.
"""

import contextlib
import gc
import importlib

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo  # two seconds, which the first optimizer step would take
import torch.distributed

# A broken package must not end the fork server: the test module's import says what is wrong.
with contextlib.suppress(Exception):
    import onefold  # noqa: F401

# The compiler's progress bar would leave a thread behind, which the workers take for a leak.
with contextlib.suppress(ImportError):
    importlib.import_module("tqdm").tqdm.monitor_interval = 0

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # collections in workers then look at new objects only: 0.1 ms instead of 70
