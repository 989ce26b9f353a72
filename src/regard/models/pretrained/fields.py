"""ConfigFields: a config.json of Hugging Face, read with a closed schema: an unknown key raises."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from ...checks import suggest_name

T = TypeVar("T")
MAX_BYTES = 1_000_000

# Keys that do not change what the model computes.
_SILENT = """
    _attn_implementation_autoset _name_or_path _num_labels architectures bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward classifier_dropout cls_token_id decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_factor
    initializer_range label2id length_penalty mask_token_id max_length min_length model_type no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states output_scores
    pad_token_id prefix problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p unk_token_id use_bfloat16 use_cache
"""
SILENT = frozenset(_SILENT.split())
FIXED: Mapping[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}


class ConfigFields:
    """The fields of a config. Each method reads a field and checks its type; `close` raises for a field never read."""

    def __init__(self, data: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self._data = data
        self._read = set(SILENT)
        for name, value in FIXED.items():
            self.must(name, value)

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read a JSON file."""
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it has {path.stat().st_size} bytes, at most {MAX_BYTES} are read")
            data = json.loads(path.read_bytes())
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}; expected a Hugging Face folder") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as a config: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path} cannot be read as a config: it must hold an object, got {type(data).__name__}")
        return cls(data, path)

    def count(self, name: str, *, default: int | None = None, least: int = 1) -> int:
        """Return an integer field."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise self.error(name, f"a whole number from {least}", value)
        return value

    def maybe_count(self, name: str, *, least: int = 1) -> int | None:
        """Return an integer field, None if it is absent or null."""
        return None if self._take(name, None) is None else self.count(name, least=least)

    def number(self, name: str, *, default: float | None = None, below: float = float("inf")) -> float:
        """Return a non-negative number."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < below:
            raise self.error(name, f"a number from 0{'' if below == float('inf') else f', below {below:g}'}", value)
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean field."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def one_of(self, name: str, table: Mapping[str, T], *, default: str | None = None) -> T:
        """Return the entry of a table that the field names."""
        value = self._take(name, default)
        if not isinstance(value, str) or value not in table:
            raise self.error(name, f"one of {', '.join(map(repr, table))}", value)
        return table[value]

    def size(self, name: str) -> int | tuple[int, int]:
        """Return (height, width), or one integer for both."""
        value = self._take(name, None)
        if not isinstance(value, list):
            return self.count(name)
        if len(value) != 2 or not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
            raise self.error(name, "a whole number, or two", value)
        return value[0], value[1]

    def within(self, name: str) -> Mapping[str, Any] | None:
        """Return a nested object, None if it is absent or null."""
        value = self._take(name, None)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, "an object of keys and values", value)
        return value

    def any(self, name: str) -> Any:
        """Return a field of any type, None if it is absent; the caller checks it."""
        return self._take(name, None)

    def must(self, name: str, *values: object) -> None:
        """Raise unless the field is absent or equal to one of these values."""
        self._read.add(name)
        if name in self._data and self._data[name] not in values:
            raise self.error(name, " or ".join(map(json.dumps, values)), self._data[name])

    def close(self, *known: str) -> None:
        """Raise for a field that was never read and is not among `known`, the fields without effect."""
        for name in self._data:
            if name not in self._read and name not in known:
                known_keys = sorted(self._read, key=lambda key: (key in SILENT or key in FIXED, key))
                raise ValueError(
                    f"{self.path}: unknown key {name!r}; remove it if it does not change what the model computes; "
                    f"{suggest_name(name, known_keys)}"
                )

    @contextmanager
    def path_in_errors(self) -> Iterator[None]:
        """Within the block, put the path of the config in front of error messages."""
        try:
            yield
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: {error}") from None

    def error(self, name: str, expected: str, value: object) -> ValueError:
        """Return the error for a field with an unexpected value."""
        return ValueError(f"{self.path}: {name} must be {expected}, got {json.dumps(value)[:100]}")

    def _take(self, name: str, default: object) -> Any:
        self._read.add(name)
        value = self._data.get(name)
        return default if value is None else value
