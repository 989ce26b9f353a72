"""The folder of a model that a user names: a folder, a model in the Hugging Face cache, or one on the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# Files that hold weights as numbers, the config and the tokenizer; nothing that runs code, and no subfolders.
FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.spm",
    "*.model",
)
NOT_FILES = ("*/*", "*.py", "*.bin", "consolidated*")
SAMPLE = Path(__file__).parent / "sample_model"


def model_folder(name: str, *, say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder of a model; download it only if it is neither a folder nor complete in the cache.

    Weights are read from safetensors only, and no code of a model is run. `say` gets a line before a download.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{name} is a file; give the folder of a model, or its name on the Hugging Face hub")
    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no folder; give the folder of a model, or its name on the hub, such as gpt2")
    if find_spec("huggingface_hub") is None:
        raise ValueError(f"{name} is no folder, and models of the hub need pip install 'regard[hf]'")
    cached = _snapshot(name, local_files_only=True)
    if cached is not None and is_complete(cached):
        return cached
    say(f"{name} is no folder here and not in the cache; downloading it from the Hugging Face hub")
    found = _snapshot(name, local_files_only=False)
    if found is None or not is_complete(found):
        raise ValueError(f"{name} on the hub has no config.json with .safetensors weights; other formats are not read")
    return found


def is_complete(folder: Path) -> bool:
    """Whether a folder has a config and all its weights; a download that was cut off may lack some."""
    if not (folder / "config.json").is_file():
        return False
    for index in folder.glob("*.safetensors.index.json"):
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    return any(folder.glob("*.safetensors"))


def _snapshot(name: str, *, local_files_only: bool) -> Path | None:
    """Return the folder of a model of the hub; None if only the cache may be asked and does not have it."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=list(FILES),
                ignore_patterns=list(NOT_FILES),
                local_files_only=local_files_only,
            )
        )
    except errors.GatedRepoError:
        reason = "asks for your consent: open its page on the hub, accept, and log in with hf auth login"
    except errors.RepositoryNotFoundError:
        reason = "is no folder, and the hub has no public model of this name; check the spelling"
    except errors.HFValidationError:
        reason = "is no folder, and cannot be the name of a model on the hub; give one such as gpt2 or org/name"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        if local_files_only:
            return None
        if isinstance(error, errors.HfHubHTTPError):
            reason = f"could not be downloaded: {error}"
        else:
            reason = (
                "is no folder, is not in the cache, and the hub cannot be reached; on a machine with a network run "
                f"hf download {name} --local-dir {name.rpartition('/')[2]}, and give that folder"
            )
    raise ValueError(f"{name} {reason}") from None
