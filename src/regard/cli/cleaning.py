"""Flags that drop training examples which are probably mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from ..data import JoinedRows, LabelledText
from ..data.row_checks import KeptRows, Key, Numbers, label_key, numbers_to_keep, pair_key
from ..data.tabular import TextRows
from ..train.dataclass_json import check_types
from .terminal import is_main_process, print_status


@dataclass(frozen=True, kw_only=True)
class Cleaning:
    """The examples to leave out of the training data; their number is printed, also if they are kept."""

    drop_empty: Annotated[bool, "Drop training examples with an empty text."] = False
    drop_duplicates: Annotated[bool, "Drop training examples that repeat an earlier one."] = False
    drop_overlap: Annotated[bool, "Drop training examples whose input is also in the validation data."] = False

    drop_extra_columns: Annotated[
        bool, "Drop training examples whose line in a table has more columns than most, such as a tab in a text."
    ] = False

    def __post_init__(self) -> None:
        check_types(self)

    def clean(self, pairs: Any, valid: Any) -> Any:
        """Return the training pairs without those to drop, and print their number."""
        kept = self._numbers(pairs, valid, pair_key)
        return pairs if kept is None else KeptRows(pairs, kept)

    def clean_labelled(self, examples: LabelledText, valid: Any) -> LabelledText:
        """Return the labelled training texts without those to drop, and print their number."""
        kept = self._numbers(examples, valid, label_key)
        return examples if kept is None else examples.only(kept)

    def _numbers(self, rows: Iterable[Any], valid: Iterable[Any] | None, key: Callable[[Any], Key]) -> Numbers | None:
        """Return the numbers of the rows to keep; None to keep all."""
        if self == Cleaning():
            return None
        if self.drop_overlap and valid is None:
            raise ValueError("--drop-overlap needs validation data; give it, or leave out the flag")
        keys = list(map(key, rows))
        others = map(key, valid or ()) if self.drop_overlap else ()
        extra = None
        if self.drop_extra_columns:
            if not isinstance(rows, (TextRows, JoinedRows, LabelledText)):
                raise ValueError("--drop-extra-columns needs a table of columns; leave out the flag")
            extra = rows.extra_columns()
        kept = numbers_to_keep(keys, empty=self.drop_empty, duplicates=self.drop_duplicates, others=others, drop=extra)
        if is_main_process():
            print_status(f"dropped {len(keys) - len(kept):,} of {len(keys):,} training examples")
        return kept
