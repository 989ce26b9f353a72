"""The site's search in pages opened as files: words of tutorials lead to the glossary or the book."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# What a reader of a tutorial types, and the section of the glossary.
QUERIES = """
long-distance dependency: long-distance-dependency
vanishing gradient: vanishing-gradient-of-a-recurrent-network
limits of CNNs, local receptive field: limits-of-convolutional-networks
parallel computation: parallel-computation
interpretability: interpretability
human visual attention: human-visual-attention
dynamic weights: dynamic-weights
recurrent cell: recurrent-neural-network-cell
LSTM cell: lstm
encoder-decoder architecture: encoder-decoder-architecture
sequence to sequence: sequence-to-sequence
initial decoder state: initial-decoder-state
context vector: context-vector
alignment score: alignment-score
Bahdanau: bahdanau-attention
joint alignment and translation: joint-model-of-alignment-and-translation
query key value: query-key-and-value
attention scores: attention-scores
attention weights: attention-weights
softmax: softmax
weighted sum: weighted-sum
attention equation: attention-equation
scaled dot-product attention: scaled-dot-product-attention
scaling factor: scaling-factor
softmax saturation: softmax-saturation
temperature: temperature
additive attention: additive-attention
dot-product attention: dot-product-attention
bilinear: bilinear-attention
Luong attention: luong-attention
global attention: global-attention
local attention: local-attention
difference between global and local attention: difference-between-global-and-local-attention
modulated output: modulated-output
many queries: many-queries-at-once
key and value projections: key-and-value-projections
self-attention: self-attention
number of queries: number-of-queries
permutation equivariance: permutation-equivariance
positional encoding: positional-encoding
relative position encoding: relative-position-encoding
masked self-attention: masked-self-attention
padding mask: padding-mask
sequence mask: sequence-mask
incorrect masking: incorrect-masking
multi-head attention: multi-head-attention
multi-head self-attention: multi-head-self-attention
concatenation of heads: concatenation-of-heads
heads capture different relations: attention-heads-capture-different-relations
memory bank: memory-bank
residual connection: residual-connection
layer normalization: layer-normalization
position-wise feed-forward: position-wise-feed-forward-network
Transformer block: transformer-block
output layer: output-layer
input embedding: input-embedding
sparse attention: sparse-attention
sliding window: sliding-window-attention
selective kernel: selective-kernel
channel attention: channel-attention
attention in convolutional networks: attention-in-convolutional-networks
soft attention: soft-and-hard-attention
hard attention: soft-and-hard-attention
structured attention: structured-attention
context representation: context-representation
scale-center constraints: scale-center-constraints
machine translation: machine-translation
text summarization: text-summarization
question answering: question-answering
cross-attention: cross-attention
language model: language-model
image captioning: image-captioning
image classification: image-classification
image generation: image-generation
image recognition: image-recognition
speech recognition: speech-recognition
reinforcement learning: reinforcement-learning
BERT: bert
masked language model: masked-language-model-next-sentence
next sentence: masked-language-model-next-sentence
pretrained model: pretrained-model
Transformer or recurrent network: transformer-or-recurrent-network
teacher forcing: teacher-forcing
exposure bias: exposure-bias
cross-entropy: cross-entropy
label smoothing: label-smoothing
dropout: dropout
ensembling: ensembling
regularization: regularization-by-entropy
truncation: truncation
training and inference steps: training-and-inference-steps
vanishing gradients in attention: exploding-and-vanishing-gradients-in-attention
long-term dependencies: long-term-dependencies
quadratic cost: quadratic-cost-computational-efficiency
computational efficiency: quadratic-cost-computational-efficiency
visualization: visualization-of-attention
implementing self-attention: implementing-self-attention
MultiHeadAttention: multiheadattention-class
scaled_dot_product_attention: scaled_dot_product_attention
number of heads: number-of-heads
SimpleAttention: attention-pooling-simpleattention
heat map: heat-map
computational graph: computational-graph
beam search: beam-search
"""
FIRST = ("dropout", "beam search", "label smoothing")


def test_each_name_of_the_list_is_a_section_of_the_glossary():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf8")
    slugs = [slug(heading) for heading in sections(text)]
    assert sections(text) == sorted(sections(text), key=str.lower)
    assert set(queries().values()) == set(slugs)
    assert len(queries()) >= 100


def sections(text: str) -> list[str]:
    return re.findall(r"^## (.*)$", text, flags=re.MULTILINE)


def slug(heading: str) -> str:
    return re.sub(r"[^\w-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def chapter_of_section() -> dict[str, str]:
    """The page that each section of the glossary links to."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf8")
    parts = re.findall(r"^## ([^\n]*)\n(.*?\]\(([^)]*)\.md\))", text, flags=re.MULTILINE | re.DOTALL)
    return {slug(heading): f"{page}.html" for heading, _, page in parts}


def queries() -> dict[str, str]:
    return dict(line.rsplit(": ", 1) for line in QUERIES.strip().splitlines())


@pytest.mark.chapters
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed; pip install 'regard[docs]'")
@pytest.mark.skipif(find_spec("playwright") is None or BROWSER is None, reason="playwright or chromium is not here")
def test_search_in_files_finds_each_name_among_its_first_three(site):
    from playwright.sync_api import sync_playwright

    missed, asked = {}, []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        found = {query: search(page, query) for query in (*queries(), *FIRST)}
        browser.close()
    chapters = chapter_of_section()
    for query, section in queries().items():
        good = (f"site/glossary.html#{section}", f"site/{chapters[section]}")
        links = [link.partition("/site/")[2] for link in found[query][:3]]
        if not any(f"site/{link}" == good[0] or f"site/{link}".partition("#")[0] == good[1] for link in links):
            missed[query] = links
    assert missed == {}
    for query in FIRST:
        rooms = [link.split("/")[-2] for link in found[query]]
        assert "book" in rooms
        assert "reference" not in rooms or rooms.index("book") < rooms.index("reference"), found[query]
    assert [url for url in asked if not url.startswith(("file:", "about:", "data:"))] == []


def search(page, query: str) -> list[str]:
    """Type a query, and return the links that are found, best first."""
    links = "[...document.querySelectorAll('a.md-search-result__link')].map(link => link.href)"
    page.fill(".md-search__input", "")
    page.press(".md-search__input", "End")
    page.wait_for_function(f"{links}.length === 0")
    page.fill(".md-search__input", query)
    page.press(".md-search__input", "End")
    page.wait_for_function(f"{links}.length > 0", timeout=5000)
    return page.evaluate(links)
