"""Tasks: train a model on data and use it, one file per task.

A task is three things in `tasks/<task>.py`, and a test of each in `tests/tasks/test_<task>.py`:

1. **Model settings**, a frozen dataclass such as `TranslationModelSettings` (short: `translation.Model`): few fields
   of plain values, each `Annotated[type, "Its help."]` with a default. Called with the tokenizers, it returns the
   config of a model in `regard.models`.
2. **`train(data, *, out, valid=None, recipe=..., model=..., resume=False, files=None, show=None) -> Outcome`**. It
   passes a function `prepare(start) -> Setup` to `setup.run`, which all tasks share. `prepare` raises every error in
   data and settings before anything is written: it reads and encodes the data (`EncodedExamples`), learns the
   vocabulary (`Vocabulary`) and builds the model. A resumed run, and one that fine-tunes another (`base`), reads its
   config and tokenizers from `start.checkpoint`.
3. **A predictor**, such as `Translator`: `load(folder)`, its verb, `score` if it has one, and
   `evaluate(data) -> dict[str, MetricValue]`, whose numbers `fit` also uses for validation.

Each checkpoint holds what `load` needs: `config.json`, which is `run_folder.config_text(TASK, config)` of a frozen
dataclass such as `LanguageConfig`, and the tokenizers. `load` reads nothing else, and no file is a pickle.

The commands of a task are in `cli/<task>.py`: a frozen dataclass such as `TranslationPlan`, whose fields are the
sections of a config file, each a group of settings whose fields are flags; `train(plan, out, resume, device, files)`,
whose docstring is the help; `TranslationEvaluation` and `TranslationScoring`, groups of flags with a method
`run(folders, device)`; and a function for each verb. `cli/commands.py` registers the commands, `cli/runs.py` the
evaluations and scorings. `tests/cli/test_<task>.py` runs each command; each bad command line is a case in
`tests/cli/malformed.toml`.

Tasks from one text to another share `pairs` (tokenizers, encoding), `seq2seq_training` and `seq2seq_task` (decoding,
scoring); tasks on images share `image_inputs` (sizes, batches).
"""

from . import answering, captioning, classification, language, summarization, translation
from .batching import Batching
from .fine_tuning import FineTuning
from .metrics import MetricValue
from .pairs import PairVocabulary
from .vocabulary import Vocabulary

Measured = MetricValue  # the name of earlier versions

__all__ = [
    "Batching",
    "FineTuning",
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
