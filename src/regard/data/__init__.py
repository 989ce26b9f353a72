"""Data: readers that name the line of bad input, tokenizers, batches that resume, and data made on the spot."""

from .answering import Answer, Question, questions
from .batching import Batches, Report
from .captions import Captioned, Captions, captions_json, captions_tsv
from .dates import Dated, Dates
from .digits import digits
from .errors import DataError, DataWarning
from .generated import Generated
from .image_files import Pictures, pixels, read_image
from .images import ImageFolder, Images, Picture, cifar10, cifar100, idx_images, npz_images
from .joined_rows import JoinedRows
from .labelled_text import Labelled, LabelledText, labelled, labelled_tsv
from .language import Windows, ids_of, read_ids, write_ids
from .lines import Lines
from .pairs import Pair, pairs_jsonl, pairs_tsv, parallel
from .shapes import Scene, Scenes, Shape
from .tabular import Stream, TextRows
from .tokenizers import Tokenizer, TokenSpan
from .toys import Arithmetic, Copy, Recall, Reverse, Sort

# Names of earlier versions.
Rows = TextRows
Span = TokenSpan

__all__ = [
    "Answer",
    "Arithmetic",
    "Batches",
    "Captioned",
    "Captions",
    "Copy",
    "DataError",
    "DataWarning",
    "Dated",
    "Dates",
    "Generated",
    "ImageFolder",
    "Images",
    "JoinedRows",
    "Labelled",
    "LabelledText",
    "Lines",
    "Pair",
    "Picture",
    "Pictures",
    "Question",
    "Recall",
    "Report",
    "Reverse",
    "Rows",
    "Scene",
    "Scenes",
    "Shape",
    "Sort",
    "Span",
    "Stream",
    "TextRows",
    "TokenSpan",
    "Tokenizer",
    "Windows",
    "captions_json",
    "captions_tsv",
    "cifar10",
    "cifar100",
    "digits",
    "ids_of",
    "idx_images",
    "labelled",
    "labelled_tsv",
    "npz_images",
    "pairs_jsonl",
    "pairs_tsv",
    "parallel",
    "pixels",
    "questions",
    "read_ids",
    "read_image",
    "write_ids",
]
