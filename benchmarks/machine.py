"""Machine: what a run says of where it ran, and where its results go."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
CHECKPOINTS: Final = RESULTS / "checkpoints.json"
PAGE: Final = ROOT / "docs" / "performance.md"


def machine() -> dict[str, str]:
    """Processor, cores, system and memory."""
    model = platform.processor() or platform.machine()
    cpu_info, memory_info = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    if cpu_info.exists():
        lines = cpu_info.read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    found = {"processor": model, "cores": str(os.cpu_count()), "system": platform.release()}
    if memory_info.exists():
        kib = int(memory_info.read_text(encoding="utf-8").split()[1])
        found["memory"] = f"{kib / (1 << 20):.0f} GiB"
    return found


def versions() -> dict[str, str]:
    """Of Python and the packages that are measured."""
    found = {"python": platform.python_version()}
    for name in ("onefold", "torch", "deepspeed", "sentence-transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def file_system(folder: Path) -> str:
    """The type of the file system that ``folder`` lies on; "unknown" where nothing says so.

    Source: proc_pid_mountinfo(5).
    """
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return "unknown"
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return "unknown"
