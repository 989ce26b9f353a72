"""A griffe extension that reads this package as it is written.

The `>>>` examples of docstrings, which Markdown would take for quotes, become fenced blocks. The classes under `term`
show the fields they are made from. Parameters become a table: a docstring without an `Args:` section gets one, with the
sentence that names the parameter, else the meaning that the name has in the whole library. Names that a chapter of the
book shows link to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

EXAMPLE = re.compile(r"^ *>>> .*(?:\n(?!\s*\n).+)*", re.MULTILINE)
FENCED = re.compile(r"^```pycon\n.*?^```\n?", re.DOTALL | re.MULTILINE)
SENTENCE = re.compile(r"(?<=[.;])\s+(?=[A-Z`a-z])")
BOOK = Path(__file__).parents[1] / "book"
UNKNOWN = "–"
# What a name means wherever it is a parameter, in the letters of the book.
COMMON = {
    "A": "weights, of one layer",
    "a": "one of the two",
    "activation": "the nonlinearity of the feed-forward",
    "allow_host": "other names under which the server may be called",
    "alpha": "strength of the length penalty",
    "answers": "answers, with their places",
    "asked": "the flags of the run",
    "at": "the coordinates of the entries",
    "attention": "the attention layer",
    "attention_dropout": "probability of dropping a weight in training",
    "B": "the other weights",
    "b": "batch rows",
    "backend": "the backend to run on; None for the fastest that can",
    "base": "base of the rotary angles, or the run to start from",
    "batch": "the examples of one step",
    "batch_first": "whether the batch is the first dim",
    "batches": "batches of examples",
    "batching": "sizes of batches",
    "beam": "width of the beam",
    "before": "the state before",
    "bert": "the encoder",
    "bias": "the bias term, added to the scores",
    "biased": "whether linear maps have a bias, or the names of those that do",
    "bidirectional": "whether keys behind the query have buckets of their own",
    "bos": "id of the token that begins a text",
    "both": "whether both directions are read",
    "buckets": "number of buckets of distances",
    "by": "the measure to compare by",
    "cache": "keys and values of earlier steps",
    "call": "the call, with its tensors and terms",
    "caption": "text below the picture",
    "captions": "captions of an image",
    "captures": "tapes, or files of them",
    "channels": "number of channels",
    "character_dim": "width of a character's vector",
    "characters": "characters, as text or ids",
    "checkpoint": "path of a checkpoint",
    "checkpoints": "paths of checkpoints",
    "classes": "number of classes, or their names",
    "cols": "number of columns, or keys",
    "compiled": "whether the model is compiled",
    "config": "sizes and choices of the model",
    "context": "vectors that are attended to",
    "context_dim": "width of the vectors that are attended to",
    "context_keep": "lengths, or True where a context token is real",
    "copies": "number of copies",
    "copy": "probability of copying",
    "cos": "cosines of the angles",
    "count": "how many",
    "coverage": "penalty for source tokens that no output attended to",
    "covered": "attention that each source token has received",
    "cross": "the attention to the source",
    "curves": "numbers over steps",
    "d": "width of queries and keys",
    "data": "the data",
    "default": "the value without one",
    "depth": "number of blocks",
    "device": "the device to run on",
    "dim": "width of the vectors",
    "document": "ids of the document",
    "documents": "ids of documents",
    "dropout": "probability of dropping a number in training",
    "dtype": "dtype of the numbers",
    "embeddings": "the embedding layers",
    "encoder": "the encoder",
    "encoding": "encoding of the file",
    "end": "id of the token that ends a text",
    "entries": "how many entries to hold",
    "eos": "id of the token that ends a text",
    "eps": "added to a variance before its root",
    "evaluate": "function that measures the model",
    "event": "an event of a head",
    "events": "events of heads",
    "examples": "examples of the data",
    "features": "features of an image, b c h w",
    "feedforward": "the feed-forward layer",
    "figsize": "width and height in inches",
    "file": "path of a file",
    "files": "paths of files",
    "first": "the first one",
    "fn": "the function",
    "folder": "path of a folder",
    "folders": "paths of folders",
    "forbid": "tokens that are never written",
    "found": "what the model found",
    "function": "the function",
    "g": "heads of keys and values",
    "generator": "source of random numbers",
    "gold": "links made by people",
    "grid": "the tiles of a block of the matrix",
    "groups": "groups of tokens",
    "h": "heads of queries",
    "head": "number of a head",
    "head_dim": "width of a head",
    "heads": "number of heads",
    "hidden": "width inside, of the state or the feed-forward",
    "hint": "the next step that a message names",
    "history": "measures of heads over steps",
    "host": "address that the server listens on",
    "how": "the operation, by its name",
    "hypotheses": "texts that the model wrote",
    "i": "positions of queries",
    "ids": "ids of tokens",
    "image": "an image, b c h w or a file",
    "images": "pixels, b c h w",
    "index": "positions to select",
    "inner": "the normalizer, or layer, within",
    "inputs": "ids or vectors that go in",
    "j": "positions of keys",
    "k": "keys, b g j d",
    "keep": "lengths, or True where a token is real",
    "kernels": "widths of the convolutions",
    "key": "vectors that keys are made of",
    "key_groups": "group of each key",
    "key_ids": "document of each key",
    "keys": "keys, b g j d",
    "kv_heads": "number of heads of keys and values",
    "label": "a class",
    "labels": "classes of the examples",
    "layer": "name of a layer",
    "layers": "names of layers",
    "length": "the largest number of positions",
    "lengths": "number of real tokens of each row",
    "limit": "the most memory to take",
    "line": "a line of a file",
    "lines": "lines of a file",
    "links": "pairs of source and target positions",
    "loader": "a `DataLoader`, or batches",
    "log": "file of the log",
    "loggers": "where the log goes",
    "logits": "scores of the classes before the softmax",
    "longest": "the most tokens of a text",
    "loss": "the loss of a batch",
    "mask": "the mask term: which keys a query may attend to",
    "max_distance": "distance from which all distances share one bucket",
    "max_length": "the most tokens to write",
    "mean": "whether probabilities or logits are averaged",
    "measure": "name of a measure",
    "measures": "names of measures",
    "megabytes": "largest size of the page",
    "members": "models of the ensemble",
    "memory": "the encoded source that a decoder attends to",
    "metric": "name of a metric",
    "metrics": "names of metrics",
    "min_length": "the fewest tokens to write",
    "mode": "the variant, by its name",
    "model": "the model",
    "models": "the models",
    "module": "the module",
    "monitor": "a `Monitor` of the model",
    "n": "a number",
    "name": "a name, for messages and files",
    "named": "names and values",
    "names": "names of the classes",
    "no_repeat": "length of word sequences that may occur once",
    "norm": "the kind of norm",
    "normalize": "the normalizer term: from scores to weights",
    "number": "how many",
    "numbers": "numbers to show",
    "offset": "position of the first query; by default the last query meets the last key",
    "open_browser": "whether to open a browser",
    "optimizer": "the optimizer",
    "other": "the one to compare or combine with",
    "out": "the file or folder to write",
    "out_channels": "number of channels that come out",
    "output": "the output of a layer",
    "outputs": "outputs of the model",
    "over": "the axis",
    "pad": "id of the padding token",
    "padding": "True at padding",
    "pairs": "pairs of source and target",
    "part": "a part of the matrix",
    "patch": "side of a patch in pixels",
    "patches": "rows and columns of patches",
    "path": "path of a file or folder",
    "paths": "paths of files",
    "patterns": "patterns of parameter names",
    "picture": "an image to draw over",
    "pictures": "images, or files of them",
    "port": "port of the server",
    "positions": "positions of the tokens",
    "prefix": "tokens to begin with",
    "prefixes": "tokens to begin each text with",
    "problem": "what is wrong, for a message",
    "prompt": "the text to go on with",
    "q": "queries, b h i d",
    "qk_norm": "the norm of queries and keys",
    "queries": "queries, b h i d",
    "query": "vectors that queries are made of",
    "query_dim": "width of the queries",
    "query_groups": "group of each query",
    "query_ids": "document of each query",
    "question": "ids of the question",
    "questions": "questions about the documents",
    "radius": "the largest distance that is visible",
    "rank": "rank of the update",
    "reads": "function that reads a file",
    "real": "True where a token is real",
    "recipe": "rate, steps and other settings of training",
    "reduction": "mean, sum or none, over tokens",
    "references": "texts to compare with",
    "report": "the progress to print",
    "residual": "the stream that the output is added to",
    "resume": "whether to continue the run of the folder",
    "root": "path of the folder",
    "rotary": "the rotary position embedding",
    "row": "a batch row",
    "rows": "batch rows",
    "run": "folder of a run",
    "s": "scores, b h i j",
    "samples": "number of random samples",
    "sampling": "temperature and truncation of sampling",
    "say": "function that prints a message",
    "scale": "factor of the scores, or scale of the colours",
    "scheduler": "the schedule of the rate",
    "score": "the score term: a number for each query and key",
    "search": "settings of the beam search",
    "seed": "seed of the random numbers",
    "sentences": "sentences of the text",
    "shape": "sizes of the tensor",
    "show": "function that reports progress",
    "sigma": "width of the Gaussian",
    "sin": "sines of the angles",
    "sink": "the extra logit in the denominator",
    "size": "number of entries along an axis",
    "sizes": "the letters of a call",
    "slots": "number of learned keys and values",
    "smoothing": "share of the target spread over all tokens",
    "source": "the source sequence",
    "source_lengths": "number of real tokens of each source",
    "source_vocabulary": "number of different tokens of sources",
    "sources": "source sequences",
    "specials": "tokens with a meaning of their own, such as the end",
    "stack": "a list of blocks",
    "start": "id of the token that begins a text",
    "state": "the state of a decoder",
    "state_dim": "width of the states that are attended to",
    "states": "encoder states, b j dim",
    "statistic": "one number per row, as `statistic` returns it",
    "step": "number of a step",
    "stepper": "a model with start, step and select",
    "steps": "number of steps",
    "stride": "step between places",
    "summaries": "summary numbers of the heads",
    "summary": "summary numbers of the heads",
    "table": "a number for each bucket of distance",
    "tags": "tags of the tokens",
    "tape": "a tape of `capture`",
    "taper": "the bias whose exponential multiplies the weights",
    "target": "the target sequence",
    "target_vocabulary": "number of different tokens of targets",
    "targets": "target sequences",
    "temperature": "factor of the spread of a softmax",
    "tensor": "a tensor",
    "text": "a text",
    "texts": "texts",
    "threshold": "the smallest score that counts",
    "title": "the title of the figure",
    "token": "a token",
    "tokenize": "function from a text to tokens",
    "tokenizer": "the tokenizer",
    "tokenizers": "tokenizers of source and target",
    "tokens": "tokens, as text or ids",
    "top": "how many of the largest to return",
    "top_k": "how many tokens may be drawn",
    "top_p": "the smallest probability mass to draw from",
    "translations": "translations to compare",
    "types": "ids of segments",
    "u": "the vector that sums over the hidden units",
    "unk": "id of the unknown token",
    "v": "values, b g j e",
    "valid": "validation data",
    "value": "the number",
    "value_dim": "width of the values",
    "values": "values, b g j e, or numbers",
    "vectors": "vectors, one for each token",
    "vit": "the image encoder",
    "vocabulary": "number of different tokens",
    "w": "the weight matrix",
    "weight": "a weight matrix",
    "weights": "attention weights",
    "width": "width of the beam, or of vectors",
    "window": "number of tokens that a token sees",
    "windows": "windows of ids",
    "words": "words of the text",
    "written": "tokens that were written",
    "x": "vectors, b n dim",
}


class Docstrings(griffe.Extension):
    """Fences examples, signs terms, and tabulates parameters."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called once, when all objects are there."""
        chapters = chapters_by_name()
        for obj in _objects(pkg):
            if isinstance(obj, griffe.Class) and any(str(x.value) == "term" for x in obj.decorators):
                obj["__init__"] = griffe.Function("__init__", parameters=griffe.Parameters(*_fields(obj)))
            if obj.docstring is None:
                continue
            text = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            if isinstance(obj, (griffe.Function, griffe.Class)):
                args = [p.name for p in obj.parameters if p.name not in ("self", "cls")]
                if args and not re.search(r"^Args:$", text, re.MULTILINE):
                    text = f"{text.rstrip()}\n\n{args_section(text, args)}"
            if obj.name in chapters and not _is_member(obj):
                text = with_chapters(text, chapters[obj.name])
            obj.docstring.value = text


def args_section(docstring: str, names: list[str]) -> str:
    """Return an `Args:` section with the meaning of each parameter."""
    return "\n".join(["Args:", *(f"    {name}: {meaning(docstring, name)}" for name in names)])


def meaning(docstring: str, name: str) -> str:
    """Return the first sentence of a docstring that names a parameter, else the common meaning of the name."""
    prose = " ".join(FENCED.sub("", docstring).split("\n\nArgs:")[0].split())
    for sentence in SENTENCE.split(prose):
        if re.search(rf"`{re.escape(name)}(?:=[^`]*)?`", sentence):
            return sentence.rstrip(".;")
        if re.search(rf"(?:^|[(\s]){re.escape(name)} (?:has|is|are|makes|may|between)\b", sentence):
            return sentence.rstrip(".;")
    return COMMON.get(name, UNKNOWN)


def with_chapters(docstring: str, chapters: list[str]) -> str:
    """Add the links to the chapters that show a name, before the `Args:` section."""
    links = ", ".join(f"[chapter {int(stem[:2])}](../book/{stem}.md)" for stem in chapters)
    before, mark, after = docstring.partition("\n\nArgs:\n")
    return f"{before.rstrip()}\n\nIn the book: {links}.{mark}{after}"


def chapters_by_name() -> dict[str, list[str]]:
    """Return, for each name that a chapter lists under "In the library", the stems of the chapters."""
    found: dict[str, list[str]] = {}
    for path in sorted(BOOK.glob("[0-9]*.md")):
        listed = re.search(r"\*\*In the library:\*\*(.*?)\n\n", path.read_text(encoding="utf8"), re.DOTALL)
        for name in re.findall(r"`regard(?:\.[a-z]+)?\.(\w+)`", listed[1]) if listed else []:
            found.setdefault(name, []).append(path.stem)
    return found


def _objects(obj: griffe.Object) -> Iterator[griffe.Object]:
    yield obj
    for member in obj.members.values():
        if isinstance(member, griffe.Object):
            yield from _objects(member)


def _is_member(obj: griffe.Object) -> bool:
    return obj.parent is not None and obj.parent.is_class


def _fields(cls: griffe.Class) -> list[griffe.Parameter]:
    found = [
        x
        for x in cls.members.values()
        if isinstance(x, griffe.Attribute) and x.annotation and "property" not in x.labels
    ]
    kind = griffe.ParameterKind.positional_or_keyword
    fields = [griffe.Parameter(x.name, annotation=x.annotation, kind=kind, default=x.value) for x in found]
    return [griffe.Parameter("self", kind=kind), *fields]
