"""The house rules on the shape of the code, read off the sources."""

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "onefold"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# The arrow: a part imports from its own and lower layers only, and of grad, param and optim none
# imports another: they meet in Unit. A file's part is its first name below onefold: a folder, or a
# module at the top, which belongs to the plan and unit layer unless it is listed elsewhere.
LAYERS = (
    ("errors", "log"),
    ("wire",),
    ("config", "plan", "unit"),
    ("grad", "param", "optim"),
    ("step", "transaction"),
    ("state",),
    ("engine", "initialize"),
    ("moe", "contrastive", "integrations", "cli"),
    ("__init__", "__main__"),
)
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
MODULES_LAYER = LAYER_OF["unit"]
STRANGERS = {"grad", "param", "optim"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# "path" or "path:qualname" below src/onefold, with the date and the reason.
TOO_LONG: dict[str, str] = {}

# Where a ZeRO stage is turned into placements; everywhere else placements are what counts.
MAY_SAY_STAGE = re.compile(r"config\w*\.py|plan\.py|placements\.py")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_names(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported, lazily and for type checkers too."""
    package = ["onefold", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*prefix, alias.name])


def imported_parts(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, name in imported_names(path, tree):
        top, _, rest = name.partition(".")
        if top == "onefold":
            part = rest.partition(".")[0]
            is_part = bool(part) and ((PACKAGE / part).is_dir() or is_module(part))
            # "from onefold import Engine" and "import onefold" read onefold/__init__.py.
            yield line, part if is_part else "__init__"


def is_module(part: str) -> bool:
    return (PACKAGE / f"{part}.py").exists()


def layer_of(part: str) -> int:
    assert part in LAYER_OF or is_module(part), f"the folder {part} is not in LAYERS yet"
    return LAYER_OF.get(part, MODULES_LAYER)


def breaks_arrow(importer: str, imported: str) -> bool:
    if importer == imported:
        return False
    if {importer, imported} <= STRANGERS:
        return True
    return layer_of(imported) > layer_of(importer)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_follow_the_arrow(path: Path) -> None:
    importer = part_of(path)
    wrong = [
        f"{name_of(path)}:{line} imports {imported}"
        for line, imported in imported_parts(path, tree_of(path))
        if breaks_arrow(importer, imported)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("importer", "imported", "expected"),
    [
        ("engine", "grad", False),
        ("grad", "unit", False),
        ("unit", "plan", False),
        ("wire", "unit", True),
        ("grad", "optim", True),
        ("grad", "engine", True),
        ("engine", "state", False),
        ("state", "engine", True),
        ("engine", "__init__", True),
    ],
)
def test_direction_of_the_arrow(importer: str, imported: str, expected: bool) -> None:
    assert breaks_arrow(importer, imported) is expected


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_the_wire_names_torch_distributed(path: Path) -> None:
    if part_of(path) == "wire":
        return
    tree = tree_of(path)
    wrong = [
        line
        for line, name in imported_names(path, tree)
        if re.match(r"torch\.distributed(\.|$)", name)
    ]
    wrong += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]
    assert not wrong, f"{name_of(path)}: lines {wrong} name torch.distributed outside of wire/"


def functions_of(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        name = f"{prefix}{child.name}" if named else prefix  # type: ignore[attr-defined]
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        yield from functions_of(child, f"{name}." if named else prefix)


def lengths(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, lines and limit of a file and of each function in it, docstrings included."""
    where = path.relative_to(PACKAGE).as_posix()
    yield where, len(path.read_text(encoding="utf-8").splitlines()), MAX_FILE_LINES
    for name, node in functions_of(tree_of(path)):
        num_lines = node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]
        yield f"{where}:{name}", num_lines, MAX_FUNCTION_LINES


def test_files_and_functions_are_short() -> None:
    measured = itertools.chain.from_iterable(map(lengths, SOURCES))
    long = {name: num_lines for name, num_lines, limit in measured if num_lines > limit}
    assert long.keys() - TOO_LONG.keys() == set(), f"a noun is missing? {long}"
    assert TOO_LONG.keys() - long.keys() == set(), "these are short again: take them off TOO_LONG"


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=name_of)
def test_sources_are_ascii(path: Path) -> None:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        assert line.isascii(), f"{name_of(path)}:{number}"


def identifiers_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name


def says_stage(identifier: str) -> bool:
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", identifier)
    return not {"stage", "stages"}.isdisjoint(word.lower() for word in words)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_stage_is_said_only_where_it_becomes_placements(path: Path) -> None:
    if MAY_SAY_STAGE.fullmatch(path.name) or part_of(path) == "cli":
        return
    wrong = [
        f"{name_of(path)}:{line} {name}"
        for line, name in identifiers_of(tree_of(path))
        if says_stage(name)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("zero_stage", True),
        ("stage3", True),
        ("ZeroStage", True),
        ("stages", True),
        ("staged", False),
        ("backstage", False),
        ("storage", False),
    ],
)
def test_words_in_identifiers(identifier: str, expected: bool) -> None:
    assert says_stage(identifier) is expected


def test_importing_does_no_work() -> None:
    """No thread, process group, device context, log handler or random number."""
    code = """
import logging, os, threading, torch, torch.distributed
tasks = "/proc/self/task"
count = lambda: len(os.listdir(tasks)) if os.path.isdir(tasks) else 0
before, seed = count(), torch.get_rng_state()
import onefold
assert count() == before, "operating system threads"
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert not torch.distributed.is_initialized(), "process group"
assert not torch.cuda.is_initialized(), "CUDA context"
assert not logging.getLogger("onefold").handlers and not logging.getLogger().handlers
assert torch.equal(seed, torch.get_rng_state()), "random number"
"""
    paths = [str(PACKAGE.parent), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
