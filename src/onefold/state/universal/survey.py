"""Universal: DeepSpeed's universal checkpoints, as its ``ds_to_universal.py`` writes them.

    DIR/latest_universal                        the tag
    DIR/TAG/zero/NAME/fp32.pt                   a parameter's master, as {"param": tensor}
    DIR/TAG/zero/NAME/exp_avg.pt, exp_avg_sq.pt optimizer states, likewise
    DIR/TAG/zero/NAME/step.pt                   how often it was stepped
    DIR/TAG/zero/optimizer_state.pt             param groups and loss scaler
    DIR/TAG/mp_rank_00_model_states.pt          buffers, counters, the scheduler, client state

From a run with sharded parameters there is a ``zero_pp_rank_R_mp_rank_00_model_states.pt`` of every
rank instead, with its fragments of frozen parameters; tensors below ``zero`` are flat, and not in a
dict; and the steps are in ``optimizer_state.pt``.

Source: ``ds_to_universal.py`` and what it writes, DeepSpeed 0.19.8.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor

from onefold.errors import CheckpointError
from onefold.state.agree import on_all_ranks
from onefold.state.folder import candidates
from onefold.state.index import INDEX, LATEST_UNIVERSAL, LOAD_UNIVERSAL
from onefold.state.snapshot import dtype_text
from onefold.state.universal.torch_files import Place, damage_of, load_data, tensor_in
from onefold.wire.control import Control

_CALL: Final = "load_checkpoint()"
_MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_PLAIN: Final = {"param", "cat_dim"}
"""What the dict around a tensor has, unless the model was split over ranks."""


class Stored(NamedTuple):
    """A tensor in a file."""

    place: Place
    shape: tuple[int, ...]
    dtype: str


class Survey(NamedTuple):
    """What the files of a folder have; the same on every rank."""

    tensors: dict[str, dict[str, Stored]]
    """By parameter, then "fp32" and the optimizer's states."""
    steps: dict[str, float]
    """By parameter."""
    fragments: dict[int, dict[str, Stored]]
    """Of frozen parameters, by rank."""
    model_files: dict[int, Path]
    """By rank; where parameters were not sharded there is rank 0's alone."""


def locate(directory: Path, tag: str | None, control: Control) -> Path:
    """The universal checkpoint to load.

    Raises:
        CheckpointError: there is none, or there are checkpoints of onefold's.
    """

    def find() -> Path:
        text = tag
        if text is None:
            own = [path.name for path in candidates(directory) if (path / INDEX).exists()]
            if own:
                raise CheckpointError(
                    f"load_checkpoint({str(directory)!r}): expected DeepSpeed's universal "
                    f"checkpoints alone, because the config has {LOAD_UNIVERSAL}, got onefold's "
                    f"{', '.join(own)} as well. Remove that key to load the newest of these, or "
                    "name the tag of the universal one."
                )
            try:
                text = (directory / LATEST_UNIVERSAL).read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(
                    f"load_checkpoint({str(directory)!r}): expected a file {LATEST_UNIVERSAL} with "
                    f"a tag, because the config has {LOAD_UNIVERSAL}, got {error}. Name the tag, "
                    "or convert a checkpoint with DeepSpeed's ds_to_universal.py."
                ) from error
        folder = directory / text
        if (folder / INDEX).exists():
            raise CheckpointError(
                f"{folder}: expected a universal checkpoint of DeepSpeed's, because the config has "
                f"{LOAD_UNIVERSAL}, got one of onefold's. Remove that key to load it."
            )
        if not (folder / "zero").is_dir():
            raise CheckpointError(
                f"{folder}: expected a universal checkpoint of DeepSpeed's, with a folder zero, "
                f"because the config has {LOAD_UNIVERSAL}. Convert a checkpoint with DeepSpeed's "
                "ds_to_universal.py."
            )
        return folder

    return Path(control.gather(str(on_all_ranks(control, _CALL, find)))[0])


def survey(folder: Path, control: Control) -> Survey:
    """Verify every file, each on one rank, and note what is in it.

    Raises:
        CheckpointError: a file is damaged, or no data, or of a model that was split over ranks.
    Communication: three exchanges.
    """

    def list_files() -> list[str]:
        found = [*folder.glob("*_model_states.pt"), *(folder / "zero").rglob("*.pt")]
        return sorted(str(path.relative_to(folder)) for path in found)

    names: list[str] = control.gather(list_files())[0]
    ranks = [match[1] for name in names if (match := _MODEL_FILE.fullmatch(name))]
    if None in ranks and len(ranks) > 1:
        raise CheckpointError(
            f"{folder}: expected one mp_rank_00_model_states.pt, or one of every rank that begins "
            "with zero_pp_rank, got both. Delete those of the older conversion."
        )

    def look() -> Survey:
        own = [folder / name for name in names[control.rank :: control.size]]
        if damaged := [text for path in own if (text := damage_of(path)) is not None]:
            raise CheckpointError("; ".join(damaged))
        noted = Survey({}, {}, {}, {})
        for path in own:
            _note(folder, path, noted)
        return noted

    result = Survey({}, {}, {}, {})
    for theirs in control.gather(on_all_ranks(control, _CALL, look)):
        for name, tensors in theirs.tensors.items():
            result.tensors.setdefault(name, {}).update(tensors)
        result.steps.update(theirs.steps)
        result.fragments.update(theirs.fragments)
        result.model_files.update(theirs.model_files)
    return result


def _note(folder: Path, path: Path, noted: Survey) -> None:
    if path.parent == folder:
        match = _MODEL_FILE.fullmatch(path.name)
        if match is None:
            raise CheckpointError(
                f"{path}: of a run with tensor, pipeline or expert parallelism. Expected one with "
                "data parallelism alone, as onefold has it."
            )
        rank = int(match[1] or 0)
        noted.model_files[rank] = path
        if match[1] is not None:
            data = load_data(path)
            fragments = data.get("frozen_param_fragments") if isinstance(data, Mapping) else None
            places = {n: Place(path, ("frozen_param_fragments", n)) for n in fragments or {}}
            noted.fragments[rank] = {n: _stored(place, data) for n, place in places.items()}
        return
    name, key = str(path.parent.relative_to(folder / "zero")), path.stem
    if name == ".":
        return
    data = load_data(path)
    if key == "step":
        step = data.item() if isinstance(data, Tensor) and data.numel() == 1 else data
        if not isinstance(step, int | float):
            raise CheckpointError(f"{path}: expected a number, got a {type(step).__name__}.")
        noted.steps[name] = step
        return
    if isinstance(data, Mapping) and (more := sorted(map(str, data.keys() - _PLAIN))):
        raise CheckpointError(
            f"{path}: has {', '.join(more)}, as of a model that was split over ranks or padded. "
            "Expected whole parameters, of a run with data parallelism alone."
        )
    place = Place(path, ("param",) if isinstance(data, Mapping) else ())
    noted.tensors.setdefault(name, {})[key] = _stored(place, data)


def _stored(place: Place, data: Any) -> Stored:
    tensor = tensor_in(data, place)
    return Stored(place, tuple(tensor.shape), dtype_text(tensor.dtype))
