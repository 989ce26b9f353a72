"""Every way to get a command wrong: exit code 2, one line that says what is wrong and where, nothing written.

A row is a name, the command line, and a pattern that the line must hold. `{files}` is the folder of good files,
`{bad}` that of bad ones (`BAD` below), `{out}` is a folder that must not come into being, and any other name is that of
a fixture, a run. A new task adds its rows, and what is wrong with its files, at the end of both tables.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from string import Formatter

import pytest

from tests.cli.commands import run

BAD = {
    "empty.txt": b"",
    "blank.txt": b"\n \n\n",
    "latin.txt": "schön\nübel\n".encode("latin1"),
    "short.de": b"ein Haus\nein Hund\n",
    "escape.de": b"\x1b[2Jein Haus\n",
    "torn.gz": b"\x1f\x8b\x08\x00nonsense",
    "one_column.tsv": b"ein Haus\ta house\nein Hund\n",
    "eight_with_control.de": b"a\n" * 7 + b"\xff\n",
    "bad.toml": b"[model\n",
    "bad.json": b'{"model": ',
    "list.json": b"[1, 2]",
    "flat.json": b'{"model": 3}',
    "latin.json": '{"data": "schön"}'.encode("latin1"),
    "section.toml": b"[modle]\ndim = 3\n",
    "key.toml": b"[model]\ndimm = 3\n",
    "type.toml": b'[model]\ndim = "wide"\n',
    "true.json": b'{"training": {"steps": true}}',
    "nan.toml": b"[training]\nrate = nan\n",
    "kind.json": b'{"model": {"kind": "perceptron"}}',
    "number.json": b'{"data": {"source": 3}}',
    "tokenizer.json": b'{"version": "1.0"}',
    "no_eos.json": b'{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,'
    b'"pre_tokenizer":null,"post_processor":null,"decoder":null,'
    b'"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}',
    "large.json": b" " * (2**20 + 1),
    "gold_few": b"0-0\n",
    "gold_words": b"0-0\n" * 7 + b"0-0 one-two\n",
    "gold_from_0": b"0-0\n" * 8,
    "letter.txt": b"Dear all\n",
    "torn.jsonl": b'{"document": "a", "summary": "b"}\n{"document": "a"\n',
    "list.jsonl": b"[1, 2]\n",
    "no_summary.jsonl": b'{"document": "a", "highlights": "b"}\n',
    "no_text.jsonl": b'{"document": "a", "summary": 3}\n',
    "surrogate.jsonl": rb'{"document": "a", "summary": "b"}' + b"\n" + rb'{"document": "a\ud800", "summary": "b"}',
    "surrogate.json": rb'{"data": [{"paragraphs": [{"context": "a\ud800", "qas": []}]}]}',
    "same_id.json": b'{"data": [{"paragraphs": [{"context": "red", "qas": [{"id": "1", "question": "b", "answers": []}'
    b', {"id": "1", "question": "c", "answers": []}]}]}]}',
    "no_data.json": b'{"version": "1.1"}',
    "no_questions.json": b'{"data": [{"paragraphs": [{"context": "a", "qas": []}]}]}',
    "no_context.json": b'{"data": [{"paragraphs": [{"qas": []}]}]}',
    "no_id.json": b'{"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b", "answers": []}]}]}]}',
    "elsewhere.json": b'{"data": [{"paragraphs": [{"context": "red", "qas": [{"id": "1", "question": "b", "answers": '
    b'[{"text": "blue", "answer_start": 0}]}]}]}]}',
    "no_number.json": b'{"data": [{"paragraphs": [{"context": "red", "qas": [{"id": "1", "question": "b", "answers": '
    b'[{"text": "red", "answer_start": "0"}]}]}]}]}',
    "unlabelled.tsv": b"good\ta film\n\tno label\n",
    "other.tsv": b"good\ta film\nugly\ta play\n",
    "few.labels": b"good\nbad\n",
    "letter.npz": b"Dear all",
    "short.idx": b"\0\0\x08\x03\0\0\0\x09\0\0\0\x08\0\0\0\x08abc",
    "pickled.bin": b"\x80\x02}q\x01",
    "letter.png": b"Dear all",
    "nowhere.tsv": b"0.png\ta scene\nnone.png\tanother\n",
    "nameless.tsv": b"a scene\n",
    "silent.tsv": b"0.png\t \n",
    "coco.json": b'{"images": []}',
    "wordless.json": b'[{"image": "0.png"}]',
    "ten.txt": b"so dull\n" + b"dull " * 10 + b"\n",
    "long.tsv": b"0.png\tone two three four five\n",
}
TRAIN = "train translation --source {files}/a.de --target {files}/a.en --out {out} "
LANGUAGE = "train language --text {files}/a.en --out {out} "
SUMMARIES = "give --documents and --summaries, or --pairs, or --jsonl, and no more"
SUMMARIZATION = "train summarization --documents {files}/news --summaries {files}/headlines --out {out} "
ANSWERING = "train answering --data {files}/squad.json --out {out} "
CLASSIFY = "train classification --labelled {files}/reviews.tsv --out {out} "
SEE = "train classification --images {files}/digits.npz --out {out} "
CAPTION = "train captioning --captions {files}/captions.tsv --images {files}/scenes --out {out} "
ROWS = [
    # the command line itself
    ("no such command", "translat", "No such command 'translat'.*translate"),
    ("no such task", "train painting --out {out}", "No such command 'painting'"),
    ("no such flag", TRAIN + "--dimm 3", "No such option: --dimm.*--dim"),
    ("a flag without its value", TRAIN + "--dim", "--dim"),
    ("a word for a number", TRAIN + "--dim wide", "--dim.*integer"),
    ("a fraction for a whole number", TRAIN + "--steps 1.5", "--steps.*integer"),
    (
        "no such choice",
        TRAIN + "--model perceptron",
        "Invalid value for '--model': 'perceptron' is not one of 'transformer'.*'luong-local-p'; see --help",
    ),
    ("no folder to write to", "train translation --source {files}/a.de --target {files}/a.en", "--out"),
    ("an argument too many", TRAIN + "more", r"unexpected extra argument\(s\) \(more\)"),
    # data
    ("no data", "train translation --out {out}", "give --source and --target, or --pairs"),
    ("half of the data", "train translation --source {files}/a.de --out {out}", "give --source and --target"),
    ("data twice over", TRAIN + "--pairs {files}/a.tsv", "give --source and --target, or --pairs"),
    ("half of the validation", TRAIN + "--valid-source {files}/a.de", "give --valid-source and --valid-target"),
    (
        "no such file",
        "train translation --source {bad}/none --target {files}/a.en --out {out}",
        "bad/none: no such file",
    ),
    ("a folder for a file", "train translation --source {bad} --target {files}/a.en --out {out}", "is a folder"),
    ("an empty file", "train translation --source {bad}/empty.txt --target {files}/a.en --out {out}", "empty.txt"),
    (
        "files of unequal length",
        "train translation --source {bad}/short.de --target {files}/a.en --out {out}",
        "a.en line 3: has 8 lines but .*short.de has 2",
    ),
    (
        "text that is not UTF-8",
        "train translation --source {bad}/latin.txt --target {bad}/short.de --out {out}",
        "latin.txt line 1: byte 4 is not valid UTF-8",
    ),
    (
        "a last line that is not UTF-8",
        "train translation --source {files}/a.de --target {bad}/eight_with_control.de --out {out}",
        "eight_with_control.de line 8: byte 1 is not valid UTF-8",
    ),
    ("a torn gzip file", "train translation --pairs {bad}/torn.gz --out {out}", "torn.gz: the gzip file is damaged"),
    (
        "a column that is missing",
        "train translation --pairs {bad}/one_column.tsv --out {out}",
        "line 2: expected at least",
    ),
    (
        "text without words",
        "train translation --source {bad}/blank.txt --target {bad}/blank.txt --out {out}",
        "no text to learn a vocabulary from",
    ),
    ("sentences that are too long", TRAIN + "--limit 1 --long error", r"a.de line 1: .*more than 1 tokens"),
    (
        "sentences that are all too long",
        TRAIN + "--limit 1",
        "as 8 of 8 do; raise the limit, or choose --long truncate",
    ),
    ("validation of nothing", TRAIN + "--valid-pairs {bad}/empty.txt", "empty.txt: holds no examples"),
    # settings
    ("a width of nothing", TRAIN + "--dim 0", "dim must be 1 or more, got 0"),
    ("a hidden width of nothing", TRAIN + "--hidden 0", "hidden must be 1 or more, got 0"),
    ("heads that do not divide", TRAIN + "--dim 10 --heads 4", "heads"),
    ("dropout of everything", TRAIN + "--dropout 1", "dropout must be at least 0 and below 1, got 1"),
    ("a vocabulary too small", TRAIN + "--vocabulary 5", "--vocabulary must leave room for the 256 bytes"),
    (
        "a vocabulary too large",
        TRAIN + "--vocabulary 9999999999999",
        "--vocabulary must be a whole number, at most 16,777,216",
    ),
    (
        "batches too small",
        TRAIN + "--batch-tokens 9",
        r"must hold the longest example, got --batch-tokens 9 and --limit \d+",
    ),
    ("tables that cannot be one", TRAIN + "--no-joint --tied all", "error: --tied all needs one vocabulary"),
    ("no steps", TRAIN + "--steps 0", "--steps must be at least 1, got 0; leave it out for 10,000 steps"),
    ("no epochs", TRAIN + "--epochs -1", "--epochs must be at least 1, got -1; leave it out for 10,000 steps"),
    ("a rate of nothing", TRAIN + "--rate 0", "peak must be a rate above 0, got 0"),
    ("a rate that is no number", TRAIN + "--rate nan", r"\[training\]: numbers must be finite, got NaN"),
    ("a seed below 0", TRAIN + "--seed -3", "seed must be between 0 and"),
    ("no such metric", TRAIN + "--metric bluе", "metric must be one of chrf, bleu, exact, loss"),
    ("patience without validation", TRAIN + "--patience 3", "patience and Plateau wait for evaluations"),
    ("a plateau without validation", TRAIN + "--schedule plateau", "patience and Plateau wait for evaluations"),
    ("a cosine over epochs", TRAIN + "--schedule cosine --epochs 2", "schedule cosine falls over a number of steps"),
    ("a warm-up longer than the run", TRAIN + "--schedule cosine --steps 9", "steps must be more than warmup"),
    ("forcing of a Transformer", TRAIN + "--forcing linear", "forcing feeds a recurrent decoder"),
    ("a k without its forcing", TRAIN + "--forcing-k 3", "forcing_k is of a forcing, got none"),
    ("a k out of range", TRAIN + "--model rnn --forcing exponential --forcing-k 3", "k must be between 0 and 1, got 3"),
    ("an average of one", TRAIN + "--average 1", "average must be at least 2 checkpoints, got 1"),
    ("no such tokenizer", TRAIN + "--tokenizer-file {bad}/none.json", "none.json: no such file"),
    ("a tokenizer that is none", TRAIN + "--tokenizer-file {bad}/tokenizer.json", "tokenizer.json: is not a tokenizer"),
    ("a tokenizer without an end", TRAIN + "--tokenizer-file {bad}/no_eos.json", "no_eos.json: the tokenizer has no"),
    # config files
    ("no such config", TRAIN + "--config {bad}/none.toml", "none.toml cannot be read: No such file"),
    ("a config that is not TOML", TRAIN + "--config {bad}/bad.toml", "bad.toml is not TOML"),
    ("a config that is not JSON", TRAIN + "--config {bad}/bad.json", "bad.json is not JSON"),
    ("a config that is not UTF-8", TRAIN + "--config {bad}/latin.json", "latin.json is not valid UTF-8"),
    ("a config too large to be one", TRAIN + "--config {bad}/large.json", "large.json is larger than 1,048,576 bytes"),
    ("a config that is a list", TRAIN + "--config {bad}/list.json", "list.json must be an object of sections, data"),
    ("a section that is a number", TRAIN + "--config {bad}/flat.json", "section 'model' must hold keys and values"),
    ("no such section", TRAIN + "--config {bad}/section.toml", "unknown section 'modle'; did you mean 'model'"),
    ("no such key", TRAIN + "--config {bad}/key.toml", r"key.toml \[model\]: unknown key 'dimm'; did you mean 'dim'"),
    ("a word in a config", TRAIN + "--config {bad}/type.toml", r"type.toml \[model\]: dim must be a whole number"),
    ("a truth in a config", TRAIN + "--config {bad}/true.json", "steps must be a whole number or None, got True"),
    ("no number in a config", TRAIN + "--config {bad}/nan.toml", "numbers must be finite, got NaN"),
    ("no such kind in a config", TRAIN + "--config {bad}/kind.json", "kind must be 'transformer' or 'rnn'"),
    (
        "a number for a file in a config",
        "train translation --config {bad}/number.json --out {out}",
        r"number.json \[data\]: source must be text or None, got 3",
    ),
    # runs
    ("a run that is there", TRAIN.replace("{out}", "{translator}"), "already holds a run; resume it"),
    ("something that is there", TRAIN.replace("{out}", "{bad}"), "already holds something; resume it"),
    ("a file for a folder", TRAIN.replace("{out}", "{bad}/letter.txt"), "out must be a folder, got .*letter.txt"),
    (
        "another model to resume",
        "train translation --out {translator} --resume --dim 99",
        "keeps its model: dim was 16",
    ),
    ("another task to resume", "train language --out {translator} --resume", "holds a run of the task 'translation'"),
    ("no such run", "translate {bad}/none", "none is no folder; expected a run"),
    ("a run of another task", "translate {writer}", "is of the task 'language', expected 'translation'"),
    ("no run at all", "translate", "Missing argument 'DIR"),
    # use of a translator
    ("a beam of nothing", "translate {translator} --beam 0", "error: --beam must be 1 or more, got 0"),
    ("none of the best", "translate {translator} --nbest 0", "error: --nbest must be 1 or more, got 0"),
    (
        "more than the beam holds",
        "translate {translator} --nbest 6",
        "error: --nbest must be at most --beam, got --nbest 6 and --beam 5; pass --beam 6 or more",
    ),
    ("no token to write", "translate {translator} --max-length 0", "error: --max-length must be 1 or more, got 0"),
    ("a penalty without end", "translate {translator} --length-penalty inf", "--length-penalty must be from -50 to 50"),
    ("a penalty beyond bounds", "translate {translator} --length-penalty 1e308", r"to 50, got 1e\+308; 0.6 is usual"),
    ("a penalty that is no number", "summarize {summarizer} --length-penalty nan", "to 50, got nan"),
    ("a beam of nothing to evaluate", "evaluate {translator} --beam 0", "error: --beam must be 1 or more, got 0"),
    ("no token to judge", "evaluate {translator} --max-length 0", "error: --max-length must be 1 or more, got 0"),
    ("no such layer", "translate {translator} --alignments {out} --layer 9", "layer must be from 0 to 2, got 9"),
    ("a layer of nothing", "translate {translator} --layer 0", "go by; give --alignments or --attention, too"),
    ("no folder for alignments", "translate {translator} --alignments {bad}/none/a", "a cannot be written"),
    ("a folder for attention", "translate {translator} --attention {bad}", "bad cannot be written"),
    ("an evaluation of nothing", "evaluate {translator}", "give --source and --target, or --pairs"),
    ("no such BLEU", "evaluate {translator} --pairs {files}/a.tsv --tokenize mine", "tokenize must be one of"),
    ("a BLEU that is elsewhere", "evaluate {translator} --pairs {files}/a.tsv --tokenize spBLEU-1K", "one of 13a"),
    ("a flag of another task", "evaluate {translator} --text {files}/a.en", "takes --source, .*, got --text"),
    ("a score without targets", "score {translator} --source {files}/a.de", "give --source and --target"),
    (
        "gold links of other pairs",
        "align {translator} --source {files}/a.de --target {files}/a.en --gold {bad}/gold_few",
        "gold_few: has 1 lines, expected one for each of the 8 pairs",
    ),
    (
        "gold links in words",
        "align {translator} --source {files}/a.de --target {files}/a.en --gold {bad}/gold_words",
        "gold_words line 8: a link must be source-target",
    ),
    (
        "gold links counted from 0",
        "align {translator} --source {files}/a.de --target {files}/a.en --gold {bad}/gold_from_0 --first 1",
        "gold_from_0 line 1: a link must be .* counted from 1, got '0-0'",
    ),
    ("an average of no run", "average {bad} --out {out}", "bad holds no run; expected one"),
    ("an average of no checkpoints", "average {translator} --last 0 --out {out}", "last must be at least 1, got 0"),
    ("an average into what is there", "average {translator} --out {bad}", "out must be a new folder"),
    # language models
    ("no text", "train language --out {out}", "give --text, a file of plain text"),
    ("no such text", "train language --text {bad}/none --out {out}", "none: no such file"),
    ("an empty text", "train language --text {bad}/empty.txt --out {out}", "empty.txt: the file is empty"),
    ("a text that is not UTF-8", "train language --text {bad}/latin.txt --out {out}", "latin.txt line 1: byte 4"),
    ("a batch less than a window", LANGUAGE + "--batch-tokens 9", "must hold a window of 256, got 9"),
    ("a window of nothing", LANGUAGE + "--length 0", "length must be 1 or more, got 0"),
    ("forcing of a language model", LANGUAGE + "--forcing linear", "forcing feeds a recurrent decoder"),
    ("no such kind of language model", LANGUAGE + "--model rnn", "--model.*'rnn' is not one of 'gpt', 'llama'"),
    ("nothing to write", "generate {writer} --tokens 0", "tokens must be at least 1, got 0"),
    (
        "a temperature below 0",
        "generate {writer} --temperature -1",
        "temperature must be 0, for the likeliest tokens, or",
    ),
    ("a share above 1", "generate {writer} --top-p 2", "top_p must be above 0 and at most 1, got 2"),
    ("no text at all", "generate {writer} --samples 0", "--samples must be 1 or more, got 0"),
    ("fewer texts than none", "generate {writer} --samples -2", "--samples must be 1 or more, got -2"),
    ("attention of no text", "generate {writer} --samples 0 --attention {out}.png", "--samples must be 1 or more"),
    ("a seed without end", "generate {writer} --seed 99999999999999999999", r"--seed must be .* below 2\^63, got 9"),
    ("a text of a seed below 0", "generate {writer} --seed -1", "--seed must be 0 or more and below .*, got -1"),
    (
        "attention of two texts",
        "generate {writer} --samples 2 --attention {out}.png",
        "is of one text, got --samples 2; leave",
    ),
    ("attention of a long text", "generate {writer} --attention {out}.png", "it sees 7 tokens more, got --tokens 200"),
    ("attention in a file of text", "generate {writer} --attention {out}.txt", "must end in .png or .safetensors"),
    ("a translator that should generate", "generate {translator}", "is of the task 'translation', expected 'language'"),
    ("an overlap of all", "evaluate {writer} --text {files}/a.en --overlap 8", "overlap must be at least 0 and below"),
    ("two language models", "score {writer} {writer} --text {files}/a.en", "works alone, got 2 folders; name one"),
    # summaries
    (
        "no documents",
        "train summarization --out {out}",
        SUMMARIES,
    ),
    (
        "documents alone",
        "train summarization --documents {files}/news --out {out}",
        SUMMARIES,
    ),
    (
        "documents twice over",
        SUMMARIZATION + "--jsonl {files}/news.jsonl",
        SUMMARIES,
    ),
    (
        "half of the documents to validate",
        SUMMARIZATION + "--valid-documents {files}/news",
        "give --valid-documents and",
    ),
    ("no such documents", "train summarization --pairs {bad}/none --out {out}", "none: no such file"),
    (
        "no documents in a file",
        "train summarization --pairs {bad}/empty.txt --out {out}",
        "empty.txt: holds no examples",
    ),
    (
        "fewer summaries than documents",
        "train summarization --documents {files}/news --summaries {bad}/short.de --out {out}",
        "news line 3: has 6 lines but .*short.de has 2",
    ),
    (
        "a summary that is not UTF-8",
        "train summarization --documents {bad}/short.de --summaries {bad}/latin.txt --out {out}",
        "latin.txt line 1: byte 4 is not valid UTF-8",
    ),
    (
        "a summary that is missing",
        "train summarization --pairs {bad}/one_column.tsv --out {out}",
        "line 2: expected at",
    ),
    (
        "a torn line of JSON",
        "train summarization --jsonl {bad}/torn.jsonl --out {out}",
        "torn.jsonl line 2: expected one",
    ),
    (
        "a list in a line of JSON",
        "train summarization --jsonl {bad}/list.jsonl --out {out}",
        "expected a JSON object, got list",
    ),
    (
        "no such field in a line of JSON",
        "train summarization --jsonl {bad}/no_summary.jsonl --out {out}",
        "line 1: expected text in the field 'summary'; the line has document, highlights",
    ),
    (
        "a number for a summary",
        "train summarization --jsonl {bad}/no_text.jsonl --out {out}",
        "expected text in the field",
    ),
    ("documents that are too long", SUMMARIZATION + "--limit 2 --long error", "news line 1: .*more than 2 tokens"),
    ("documents that are all too long", SUMMARIZATION + "--limit 2 --long drop", "as 6 of 6 do; raise the limit"),
    ("batches that hold no document", SUMMARIZATION + "--batch-tokens 9", "tokens of a batch must hold the longest"),
    ("no such summarizer", SUMMARIZATION + "--model luong-dot", "--model.*'luong-dot' is not one of 'pointer', 'rnn'"),
    ("smoothing of a pointer", SUMMARIZATION + "--smoothing 0.1", "smoothing must be 0 where words are copied"),
    (
        "coverage of a Transformer",
        SUMMARIZATION + "--model transformer --coverage 1",
        "coverage is of recurrent models",
    ),
    (
        "a mask for a pointer",
        SUMMARIZATION + "--encoder-mask 'Window(3)'",
        "got --model pointer; leave them out, or choose --model transformer",
    ),
    (
        "no such mask of an encoder",
        SUMMARIZATION + "--model transformer --encoder-mask 'Widow(3)'",
        "unknown term 'Widow'; did you mean Window",
    ),
    (
        "a memory without segments",
        SUMMARIZATION + "--model transformer --memory 3",
        "got --memory 3 and no segment; pass --segment$",
    ),
    ("no such metric of summaries", SUMMARIZATION + "--metric rouge", "metric must be one of rougeL, rouge1, rouge2"),
    ("a beam of nothing to summarize", "summarize {summarizer} --beam 0", "error: --beam must be 1 or more, got 0"),
    ("repeats of nothing", "summarize {summarizer} --no-repeat 0", "error: --no-repeat must be 1 or more, got 0"),
    ("repeats of nothing to evaluate", "evaluate {summarizer} --no-repeat 0", "error: --no-repeat must be 1 or more"),
    ("a length below 0", "summarize {summarizer} --min-length -1", "error: --min-length must be 0 or more, got -1"),
    (
        "the shortest above the longest",
        "summarize {summarizer} --min-length 9 --max-length 8",
        "error: --min-length must be at most --max-length, got --min-length 9 and --max-length 8; pass --max-length 9",
    ),
    ("a translator that should summarize", "summarize {translator}", "is of the task 'translation', expected 'summari"),
    ("no such ROUGE", "evaluate {summarizer} --pairs {files}/a.tsv --rouge latin", "'latin' is not one of 'english'"),
    (
        "summaries to score without documents",
        "score {summarizer} --summaries {files}/headlines",
        SUMMARIES,
    ),
    # questions and answers
    ("no questions", "train answering --out {out}", "give --data, a file in the format of SQuAD"),
    ("no such questions", "train answering --data {bad}/none.json --out {out}", "none.json: no such file"),
    ("questions that are not JSON", "train answering --data {bad}/bad.json --out {out}", "bad.json line 1: not valid"),
    ("questions that are not UTF-8", "train answering --data {bad}/latin.json --out {out}", "latin.json: byte 14 is"),
    (
        "questions in a torn file",
        "train answering --data {bad}/torn.gz --out {out}",
        "torn.gz: the gzip file is damaged",
    ),
    (
        "a list for questions",
        "train answering --data {bad}/list.json --out {out}",
        "the top: expected an object, got list",
    ),
    (
        "questions of another format",
        "train answering --data {bad}/no_data.json --out {out}",
        "the top: expected a list in 'data'",
    ),
    ("documents without questions", "train answering --data {bad}/no_questions.json --out {out}", "holds no questions"),
    (
        "questions without a document",
        "train answering --data {bad}/no_context.json --out {out}",
        r"data\[0\].paragraphs\[0\]: expected text in 'context', got nothing",
    ),
    (
        "a question without an id",
        "train answering --data {bad}/no_id.json --out {out}",
        r"paragraphs\[0\].qas\[0\]: expected text in 'id', got nothing",
    ),
    (
        "an answer that stands elsewhere",
        "train answering --data {bad}/elsewhere.json --out {out}",
        r"qas\[0\].answers\[0\]: the context does not read 'blue' at character 0",
    ),
    (
        "an answer at no number",
        "train answering --data {bad}/no_number.json --out {out}",
        "expected a whole number in 'answer_start', got '0'",
    ),
    ("no such validation", ANSWERING + "--valid-data {bad}/none.json", "none.json: no such file"),
    ("a window of no tokens", ANSWERING + "--window 0 --overlap 0", "--window must be at least 1 token, got 0"),
    ("windows that do not advance", ANSWERING + "--window 9 --overlap 9", "overlap must be at least 0 and below"),
    (
        "questions that are too long",
        ANSWERING + "--question-limit 1 --long error",
        "question '0a' has more than 1 tokens",
    ),
    (
        "questions that are all too long",
        ANSWERING + "--question-limit 1 --long drop",
        "as 4 of 4 have; raise the limit",
    ),
    ("a batch less than a row", ANSWERING + "--batch-tokens 3", "tokens of a batch must hold the longest row of 9"),
    ("no such kind of reader", ANSWERING + "--model gpt", "--model.*'gpt' is not one of 'reader', 'bert'"),
    ("states that do not divide", ANSWERING + "--dim 9 --heads 4", "hidden must be .* --heads 4"),
    ("forcing of a reader", ANSWERING + "--forcing linear", "forcing feeds a recurrent decoder its own words"),
    ("no such pretrained folder", ANSWERING + "--pretrained {bad}/none", "none"),
    ("a pretrained folder of something else", ANSWERING + "--pretrained {bad}", "config.json"),
    ("a size for a pretrained model", ANSWERING + "--pretrained {bad} --dim 9", "pretrained brings a model and a"),
    ("nothing to answer", "answer {answerer}", "give --document, and questions about it, or --data"),
    ("too much to answer", "answer {answerer} --document {files}/a.en --data {files}/squad.json", "give --document"),
    ("no such document", "answer {answerer} --document {bad}/none --question Who", "none: no such file"),
    (
        "an empty document",
        "answer {answerer} --document {bad}/empty.txt --question Who",
        "empty.txt: the file is empty",
    ),
    (
        "a document that is not UTF-8",
        "answer {answerer} --document {bad}/latin.txt --question Who",
        "latin.txt line 1: byte 4",
    ),
    (
        "no answer at all",
        "answer {answerer} --document {files}/a.en --question Who --nbest 0",
        "error: --nbest must be 1 or more, got 0",
    ),
    (
        "a file for printed answers",
        "answer {answerer} --document {files}/a.en --out {out}",
        "--out is for the answers to --data",
    ),
    (
        "questions twice over",
        "answer {answerer} --data {files}/squad.json --question Who",
        "--data has questions of its own",
    ),
    ("no folder for answers", "answer {answerer} --data {files}/squad.json --out {bad}/none/a", "a cannot be written"),
    (
        "a translator that should answer",
        "answer {translator} --document {files}/a.en --question Who",
        "expected 'answering'",
    ),
    ("an evaluation without questions", "evaluate {answerer}", "give --data, a file in the format of SQuAD"),
    ("two that answer", "evaluate {answerer} {answerer} --data {files}/squad.json", "works alone, got 2 folders"),
    (
        "a score of answers",
        "score {answerer} --text {files}/a.en",
        "is of the task 'answering', expected 'translation'",
    ),
    # the operator
    ("a shape of three", "explain --shape 1,8,9", "shape must be batch,heads,length,width, .*, got '1,8,9'"),
    ("a shape of words", "explain --shape a,b,c,d", "shape must be batch,heads,length,width"),
    ("no such mask", "explain --shape 1,1,4,4 --mask 'Casual()'", "unknown term 'Casual'; did you mean Causal"),
    ("code for a mask", "explain --shape 1,1,4,4 --mask '__import__(\"os\")'", "unknown term '__import__'"),
    ("a score for a mask", "explain --shape 1,1,4,4 --mask 'Dot()'", r"mask must be a mask, got Dot\(\)"),
    ("fewer keys than none", "explain --shape 1,8,64,64 --keys -4", "--keys must be 0 or more, got -4"),
    ("fewer heads than one", "explain --shape 1,8,64,64 --kv-heads -1", "--kv-heads must be 1 or more, got -1"),
    ("a shape past counting", "explain --shape 1,8,99999999999999999,64", "shape must be one that memory could hold"),
    ("a length past counting", "explain --shape 1,8,9999999999999999999999,64", "shape must be one that memory could"),
    ("heads that share unevenly", "explain --shape 1,6,4,4 --kv-heads 4", "heads"),
    # texts and images in classes
    ("nothing to classify", "train classification --out {out}", "give texts by --labelled or --text, or images by"),
    ("texts and images", CLASSIFY + "--images {files}/digits.npz", "or images by --images, one of them"),
    ("texts without labels", "train classification --text {files}/reviews.txt --out {out}", "give --labels, a file"),
    ("images without labels", "train classification --images {files}/digits.idx --out {out}", "give --labels, a file"),
    (
        "fewer labels than texts",
        "train classification --text {files}/reviews.txt --labels {bad}/few.labels --out {out}",
        "reviews.txt line 3: has 8 lines but .*few.labels has 2",
    ),
    (
        "a label that is empty",
        "train classification --labelled {bad}/unlabelled.tsv --out {out}",
        "line 2: the label is",
    ),
    ("a column there is not", CLASSIFY + "--text-column 7", "reviews.tsv line 1: expected at least 8 columns"),
    ("columns by name and by number", CLASSIFY + "--text-column words", "all by name or all by number, got"),
    ("labels unknown in training", CLASSIFY + "--valid-labelled {bad}/other.tsv", "line 2: unknown label 'ugly'"),
    ("texts for images", CLASSIFY + "--model vit", "kind must be rnn or pool or bert for texts, got 'vit'"),
    ("images for texts", SEE + "--model bert", "kind must be convnet or vit for images, got 'bert'"),
    (
        "validation of another kind",
        CLASSIFY + "--valid-images {files}/digits.npz",
        "must be alike, got texts and images",
    ),
    (
        "no such classes of images",
        "train classification --images {bad}/none --out {out}",
        "none: no such file or folder",
    ),
    ("images in no folders", "train classification --images {files}/scenes --out {out}", "'0.png' lies in no class"),
    ("a folder without images", "train classification --images {bad} --out {out}", "letter.png' lies in no class"),
    ("images that are no array file", "train classification --images {bad}/letter.npz --out {out}", "not an .npz file"),
    ("no such array", SEE + "--image-array x_train", "digits.npz: no array 'x_train'; it has images, labels"),
    (
        "images that are cut short",
        "train classification --images {bad}/short.idx --labels {files}/digits.labels --out {out}",
        "short.idx: the header says 9 x 8 x 8 bytes, the file has 3",
    ),
    ("CIFAR that is pickled", "train classification --images {bad}/pickled.bin --out {out}", "looks like the Python"),
    ("images of two channels", SEE + "--channels 2", "channels must be 1, grey, or 3, colour, got 2"),
    ("a patch that does not divide", SEE + "--model vit --patch 3", "image must divide into patches"),
    ("letters a BERT does not read", CLASSIFY + "--model bert --spelling", "spelling is read by an rnn or a pool"),
    ("forcing of a classifier", CLASSIFY + "--forcing linear", "forcing feeds a recurrent decoder"),
    ("images for a critic", "classify {critic} {files}/scenes/0.png", "classifies lines of standard input, got images"),
    ("no images for a seer", "classify {seer}", "run classifies images, got none; name them"),
    ("no such image", "classify {seer} {bad}/none.png", "none.png: no such image"),
    ("an image that is none", "classify {seer} {bad}/letter.png", "letter.png: not an image that can be read"),
    ("the top of nothing", "classify {critic} --top 0", "top must be at least 1, got 0"),
    ("attention as a letter", "classify {critic} --attention {bad}/a.txt", "must end in .png or .safetensors, got"),
    (
        "a text that a critic does not read to its end",
        "look {critic} --text {bad}/ten.txt --out {bad}/a.safetensors",
        "line 2 of the text has more than the 9 tokens the model reads; shorten it",
    ),
    ("a translator that should classify", "classify {translator}", "of the task 'translation', expected 'class"),
    (
        "a critic of images",
        "evaluate {critic} --images {files}/digits.npz",
        "classifies texts, got images|classes must be",
    ),
    ("an evaluation of no classes", "evaluate {critic}", "give texts by --labelled or --text, or images by --images"),
    ("two classifiers", "evaluate {critic} {critic} --labelled {files}/reviews.tsv", "works alone, got 2 folders"),
    (
        "another model of a critic",
        "train classification --out {critic} --resume --dim 99",
        "keeps its model: dim was 16",
    ),
    # images with captions
    ("nothing to describe", "train captioning --out {out}", "give --captions and --images"),
    ("captions without images", "train captioning --captions {files}/captions.tsv --out {out}", "give --captions and"),
    (
        "half of the validating captions",
        CAPTION + "--valid-images {files}/scenes",
        "give --valid-captions and --valid-",
    ),
    ("no such captions", "train captioning --captions {bad}/none --images {files}/scenes --out {out}", "no such file"),
    (
        "no such images",
        "train captioning --captions {files}/captions.tsv --images {bad}/none --out {out}",
        "no such folder",
    ),
    (
        "a caption of no image",
        "train captioning --captions {bad}/nowhere.tsv --images {files}/scenes --out {out}",
        "nowhere.tsv line 2: there is no image 'none.png' in",
    ),
    (
        "a caption without a name",
        "train captioning --captions {bad}/nameless.tsv --images {files}/scenes --out {out}",
        "nameless.tsv line 1: expected at least 2 columns, got 1",
    ),
    (
        "a caption that is empty",
        "train captioning --captions {bad}/silent.tsv --images {files}/scenes --out {out}",
        "silent.tsv line 1: the caption of '0.png' is empty",
    ),
    (
        "captions that are not JSON",
        "train captioning --captions {bad}/bad.json --images {files}/scenes --out {out}",
        "bad.json line 1: not valid JSON",
    ),
    (
        "captions without annotations",
        "train captioning --captions {bad}/coco.json --images {files}/scenes --out {out}",
        "coco.json: expected the lists 'images' and 'annotations'",
    ),
    (
        "an image without a caption",
        "train captioning --captions {bad}/wordless.json --images {files}/scenes --out {out}",
        r"wordless.json: \[0\]: expected the text of a name and of a caption",
    ),
    ("captions that are all too long", CAPTION + "--limit 1", "more than 1, as 16 of 16 do; raise the limit"),
    ("captions too long to keep", CAPTION + "--limit 5 --long error", "png: the caption has .* more than 5"),
    ("an image halved to nothing", CAPTION + "--size 4", "4 pixels a side cannot be halved 3 times; pass fewer stages"),
    ("an odd width", CAPTION + "--dim 15", "dim must be even, half for the row and half for the column"),
    ("no such way to look", CAPTION + "--model blind", "--model.*'blind' is not one of 'soft', 'hard'"),
    ("forcing of a captioner", CAPTION + "--forcing linear", "forcing is not for captioners"),
    ("no such metric of captions", CAPTION + "--metric bleu5", "metric must be one of bleu4, .*did you mean 'bleu"),
    ("nothing to caption", "caption {captioner}", "Missing argument 'IMAGE"),
    ("no such image to caption", "caption {captioner} {bad}/none.png", "none.png: no such image"),
    ("a letter to caption", "caption {captioner} {bad}/letter.png", "letter.png: not an image that can be read"),
    ("a beam of no captions", "caption {captioner} {files}/scenes/0.png --beam 0", "--beam must be 1 or more, got 0"),
    ("a beam of nothing to judge captions", "evaluate {captioner} --beam 0", "error: --beam must be 1 or more, got 0"),
    (
        "a critic that should caption",
        "caption {critic} {files}/scenes/0.png",
        "'classification', expected 'captioning'",
    ),
    (
        "where words looked as a letter",
        "caption {captioner} {files}/scenes/0.png --attention {bad}/a.txt",
        "attention must end in .png or .safetensors",
    ),
    ("an evaluation of no captions", "evaluate {captioner}", "give --captions and --images"),
    (
        "questions of one id",
        "answer {answerer} --data {bad}/same_id.json",
        r"same_id.json: data\[0\].paragraphs\[0\].qas\[1\]: the id '1' is that of .*qas\[0\] already",
    ),
    # half a character, as Python reads bytes of an argument that are not UTF-8, and JSON its escapes
    (
        "a prompt that is not UTF-8",
        "generate {writer} --prompt a\udcff",
        r"error: text must be Unicode, got the lone surrogate '\\udcff' as character 2; write it in UTF-8$",
    ),
    (
        "a question that is not UTF-8",
        "answer {answerer} --document {files}/bridge.txt --question a\udcffb",
        r"text must be Unicode, got the lone surrogate '\\udcff'",
    ),
    (
        "half a character in JSON to train on",
        "train summarization --jsonl {bad}/surrogate.jsonl --out {out}",
        r"surrogate.jsonl line 2: the field 'document' must be Unicode, got the lone surrogate '\\ud800'",
    ),
    (
        "half a character in JSON to score",
        "score {summarizer} --jsonl {bad}/surrogate.jsonl",
        "surrogate.jsonl line 2: the field 'document' must be Unicode",
    ),
    (
        "half a character in JSON to answer by",
        "evaluate {answerer} --data {bad}/surrogate.json",
        r"surrogate.json: data\[0\].paragraphs\[0\]: 'context' must be Unicode",
    ),
]


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong") / "bad"
    folder.mkdir()
    for name, content in BAD.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(("line", "pattern"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_bad_input_is_answered_in_one_line(line, pattern, files, bad, tmp_path, request):
    places = {"files": files, "bad": bad, "out": tmp_path / "out"}
    runs = {name for _, name, _, _ in Formatter().parse(line) if name and name not in places}
    places |= {name: request.getfixturevalue(name) for name in runs}
    kept = [bad, *(places[name] for name in runs)]
    before = {path: path.stat().st_mtime_ns for folder in kept for path in folder.rglob("*")}
    ended = run(*shlex.split(line.format(**places)), stdin="ein Haus\n")
    assert ended.code == 2, ended
    [said] = ended.err.splitlines()
    assert said.startswith("error: ")
    assert re.search(pattern, said), said
    assert ended.out == ""
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for folder in kept for path in folder.rglob("*")} == before


def test_input_that_is_not_text_is_named_by_its_line(translator):
    ended = run("translate", translator, stdin=b"ein Haus\nsch\xf6n\n")
    assert ended.code == 2
    assert ended.err == "error: standard input line 2: byte 4 is not valid UTF-8; convert it with iconv\n"


def test_control_characters_of_a_file_name_do_not_reach_the_terminal(tmp_path):
    ended = run("train", "language", "--text", "\x1b[2J.txt", "--out", tmp_path / "out")
    assert ended.err == "error: \\x1b[2J.txt: no such file; check the path\n"


def test_more_attention_than_a_tape_holds_is_refused_before_anything_is_printed(translator, tmp_path):
    ended = run("translate", translator, "--attention", tmp_path / "a.safetensors", stdin="das\n" * 501)
    assert ended.code == 2
    assert (
        ended.err == "error: --attention a.safetensors holds at most 500 examples, got more; give it fewer at a time\n"
    )
    assert ended.out == ""
    assert list(tmp_path.iterdir()) == []


ONTO = {
    "an image with where a classifier looked": "classify {seer} {tmp}/0.png --attention {tmp}/0.png",
    "an image with where words looked": "caption {captioner} {tmp}/0.png --attention {tmp}/0.png",
    "questions with their answers": "answer {answerer} --data {tmp}/squad.json --out {tmp}/squad.json",
    "weights with where sentences looked": "translate {translator} --attention {translator}/{weights}",
    "weights with links": "translate {translator} --alignments {translator}/{weights}",
    "weights with where documents looked": "summarize {summarizer} --attention {summarizer}/{weights}",
    "weights with where a text looked": "generate {writer} --attention {writer}/{weights}",
    "weights with where questions looked": "answer {answerer} --data {tmp}/squad.json --attention {answerer}/{weights}",
}


@pytest.mark.parametrize("line", ONTO.values(), ids=ONTO)
def test_what_is_read_is_not_written_over(line, files, tmp_path, request):
    for name in ("scenes/0.png", "squad.json"):
        shutil.copy(files / name, tmp_path)
    runs = [name for _, name, _, _ in Formatter().parse(line) if name not in (None, "tmp", "weights")]
    places = {name: request.getfixturevalue(name) for name in runs}
    folder = places[runs[0]]
    places |= {"tmp": tmp_path, "weights": next(folder.rglob("model.safetensors")).relative_to(folder)}
    before = {path: path.stat().st_mtime_ns for kept in (tmp_path, folder) for path in kept.rglob("*")}
    ended = run(*shlex.split(line.format(**places)), stdin="ein Haus\n")
    assert ended.code == 2, ended
    assert re.fullmatch("error: .* (is read, and|is there already, in the folder that is read).*\n", ended.err)
    assert {path: path.stat().st_mtime_ns for kept in (tmp_path, folder) for path in kept.rglob("*")} == before


def test_standard_input_is_not_written_over(translator, tmp_path):
    (tmp_path / "in.de").write_text("ein Haus\n")
    command = [sys.executable, "-m", "regard", "translate", translator, "--alignments", tmp_path / "in.de"]
    with (tmp_path / "in.de").open() as lines:
        ended = subprocess.run(command, stdin=lines, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert re.fullmatch("error: .*in.de is read as standard input, and writing would .*\n", ended.stderr)
    assert (tmp_path / "in.de").read_text() == "ein Haus\n"


def test_names_are_told_once():
    names = [row[0] for row in ROWS]
    assert len(set(names)) == len(names)
