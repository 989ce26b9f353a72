"""Heads over a Bert: sequence classification, token tagging, extractive question answering."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..argument_hints import CALLS, PADDING, with_argument_hints
from ..checks import check_int, check_keys, check_submodel
from ..nn.dropout import Dropout
from ..nn.losses import Loss, cross_entropy
from .bert import Bert, FirstTokenPool
from .initialization import initialize
from .named_choices import Activation, activation_named
from .padding import Padded, keep_of


class BertClassifier(nn.Module):
    """A class for each sequence, or each pair of them.

    >>> from regard.models import BertConfig
    >>> BertClassifier(Bert(BertConfig.tiny(vocabulary=100)), classes=3)(torch.randint(1, 100, (2, 7))).shape
    torch.Size([2, 3])

    It reads the pooler of `bert`, or has its own one: if `bert` has none, or if `pooler` names an activation.
    """

    def __init__(self, bert: Bert, *, classes: int, pooler: Activation | None = None) -> None:
        super().__init__()
        check_submodel("bert", bert, "Bert", "BertClassifier")
        check_int("classes", classes, least=1)
        self.bert = bert
        self.pooler: Activation = pooler or "tanh"
        needs_pool = pooler is not None or bert.pool is None
        self.pool = FirstTokenPool(bert.config.dim, activation=activation_named(self.pooler)) if needs_pool else None
        self.dropout = Dropout(bert.config.dropout)
        self.classes = nn.Linear(bert.config.dim, classes)
        initialize(self.classes)

    @with_argument_hints(CALLS, renamed=PADDING)
    def forward(
        self, ids: Int[Tensor, "b n"], types: Int[Tensor, "b n"] | None = None, *, keep: Padded | None = None
    ) -> Float[Tensor, "b classes"]:
        pool = self.pool or self.bert.pool
        assert pool is not None
        return self.classes(self.dropout(pool(self.bert(ids, types, keep=keep), keep)))

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """Return the cross entropy of `label` (b,)."""
        check_keys(batch, "ids", "label")
        logits = self(batch["ids"], batch.get("types"), keep=batch.get("ids_lengths"))
        return cross_entropy(logits, batch["label"])


class BertTagger(nn.Module):
    """A tag for each token: parts of speech, names.

    >>> from regard.models import BertConfig
    >>> BertTagger(Bert(BertConfig.tiny(vocabulary=100)), tags=9)(torch.randint(1, 100, (2, 7))).shape
    torch.Size([2, 7, 9])
    """

    def __init__(self, bert: Bert, *, tags: int) -> None:
        super().__init__()
        check_submodel("bert", bert, "Bert", "BertTagger")
        check_int("tags", tags, least=1)
        self.bert = bert
        self.dropout = Dropout(bert.config.dropout)
        self.tags = nn.Linear(bert.config.dim, tags)
        initialize(self.tags)

    @with_argument_hints(CALLS, renamed=PADDING)
    def forward(
        self, ids: Int[Tensor, "b n"], types: Int[Tensor, "b n"] | None = None, *, keep: Padded | None = None
    ) -> Float[Tensor, "b n tags"]:
        return self.tags(self.dropout(self.bert(ids, types, keep=keep)))

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """Return the cross entropy of `tags` (b, n) of real tokens; negative tags do not count."""
        check_keys(batch, "ids", "tags")
        tags, lengths = batch["tags"], batch.get("ids_lengths")
        logits = self(batch["ids"], batch.get("types"), keep=lengths)
        counted = tags >= 0 if lengths is None else (tags >= 0) & keep_of(lengths, tags, name="ids_lengths")
        return cross_entropy(logits, tags, counted=counted)


class BertReader(nn.Module):
    """Start and end of the answer; question and document are one sequence and attend to each other.

    >>> from regard.models import BertConfig, best_spans
    >>> reader = BertReader(Bert(BertConfig.tiny(vocabulary=100))).eval()
    >>> start, end = reader(torch.randint(1, 100, (2, 9)))
    >>> spans = best_spans(start, end, among=torch.arange(9).expand(2, 9) >= 4, longest=3)
    >>> spans.shape, bool((spans[:, 0] >= 4).all()), bool((spans[:, 1] - spans[:, 0] < 3).all())
    (torch.Size([2, 2]), True, True)
    """

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        check_submodel("bert", bert, "Bert", "BertReader")
        self.bert = bert
        self.span = nn.Linear(bert.config.dim, 2)
        initialize(self.span)

    @with_argument_hints(CALLS, renamed=PADDING)
    def forward(
        self, ids: Int[Tensor, "b n"], types: Int[Tensor, "b n"] | None = None, *, keep: Padded | None = None
    ) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n"]]:
        """The logits of each token as the start and as the end, both inclusive; -inf for padding."""
        start, end = self.span(self.bert(ids, types, keep=keep)).unbind(-1)
        if keep is None:
            return start, end
        hidden = ~keep_of(keep, ids)
        return start.masked_fill(hidden, -torch.inf), end.masked_fill(hidden, -torch.inf)

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """The mean over `start` (b,) and `end` (b,); both are 0, or below 0 and not counted, if there is none."""
        check_keys(batch, "ids", "start", "end")
        logits = self(batch["ids"], batch.get("types"), keep=batch.get("ids_lengths"))
        start, end = (
            cross_entropy(x, batch[name], counted=batch[name] >= 0)
            for x, name in zip(logits, ("start", "end"), strict=True)
        )
        return Loss((start.sum + end.sum) / 2, start.count)
