"""Tasks: from data to a model that does something, one file a task.

A task is three things in `tasks/<task>.py`, and a test of each in `tests/tasks/test_<task>.py`:

1. **A sketch**, the frozen dataclass `Model`: few fields of plain values, each `Annotated[type, "what it means"]` with
   a default. Called with the tokenizers it gives the config of a model in `regard.models`.
2. **`train(data, *, out, valid=None, recipe=..., model=..., resume=False, files=None, show=None) -> Outcome`**. It
   hands a function `prepare(start) -> Setup` to `training.run`, which does what is common to all. Whatever can be
   wrong is found in `prepare`, before anything is written: there data is read and encoded (`Encoded`), the vocabulary
   learned (`Vocabulary`), the model built. A run that goes on has its config and tokenizers in `start.checkpoint`.
3. **A predictor**, a class named for what it does (`Translator`): `load(folder)`, its verb, `score` where it has one,
   and `evaluate(data) -> dict[str, Measured]`, which as plain numbers is also what `fit` validates by.

Each checkpoint holds what `load` needs: `config.json`, that is `runs.described(TASK, config)` of a frozen dataclass
`Config`, and the tokenizers. Nothing else is looked at, and nothing is a pickle.

Its commands are in `cli/<task>.py`: a frozen dataclass `Plan`, whose fields are the sections of a config file, each a
group of settings whose fields are flags; `train(plan, out, resume, files)`, whose docstring is the help; `Evaluation`
and `Scoring`, groups of flags with a method `run(folders)`; and a function for each verb. `cli/__init__.py` names
these, `cli/runs.py` what `evaluate` and `score` ask. `tests/cli/test_<task>.py` runs each command, and each way to get
one wrong is a row of `tests/cli/test_malformed.py`.

Tasks that read a text and write another share `pairs` (tokenizers, encoding), `writing` (training) and `writer`
(decoding, scoring); tasks over images share `seeing` (what a model sees of them, batches).
"""

from . import answering, captioning, classification, language, summarization, translation
from .batching import Batching
from .metrics import MetricValue
from .pairs import PairVocabulary
from .vocabulary import Vocabulary

Measured = MetricValue  # the name of earlier versions

__all__ = [
    "Batching",
    "Measured",
    "MetricValue",
    "PairVocabulary",
    "Vocabulary",
    "answering",
    "captioning",
    "classification",
    "language",
    "summarization",
    "translation",
]
