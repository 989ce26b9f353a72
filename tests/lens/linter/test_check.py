"""check names the bug of seeded code, is silent on code that is right, and says what it assumed and could not try."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from regard import Causal, Diagonal, Entmax, Hard, Prefix, Sparsemax, Window
from regard.lens.linter.findings import CHECKS
from regard.models import Bert, BertConfig, Gpt, GptConfig
from regard.nn import Attention, DecoderBlock, EncoderBlock, FeedForward, LatentAttention, Rotary

from .seeded_bugs import BUGS, DIM, HEADS, RIGHT, MergedByView, Tutorial

SEEDED = [(name, n) for name, cases in BUGS.items() for n in range(len(cases))]


def test_every_check_has_three_seeded_bugs_and_a_look_alike():
    assert BUGS.keys() == RIGHT.keys() == CHECKS.keys()
    assert {len(cases) for cases in BUGS.values()} == {3}


@pytest.mark.parametrize(("name", "n"), SEEDED)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_seeded_bug_is_named_and_nothing_else(name, n, seed):
    torch.manual_seed(seed)
    make, arguments = BUGS[name][n]
    report = regard.check(make(), **arguments)
    assert [finding.name for finding in report.findings] == [name]
    [finding] = report.findings
    assert finding.tried
    assert finding.result
    assert finding.cause
    assert not report
    with pytest.raises(AssertionError, match=CHECKS[name]):
        report.raise_if_any()


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_look_alike_is_right(name, seed):
    torch.manual_seed(seed)
    make, arguments = RIGHT[name]
    report = regard.check(make(), **arguments)
    assert report.findings == ()
    if name != "future-leak":
        assert name in report.passed
    report.raise_if_any()


LAYERS = {
    "plain": lambda: Attention(24, 4),
    "grouped, rotary, causal": lambda: Attention(24, 6, kv_heads=2, mask=Causal(), rotary=Rotary(4)),
    "window": lambda: Attention(24, 4, mask=Causal() & Window(3)),
    "no self": lambda: Attention(24, 4, mask=Causal() & ~Diagonal()),
    "prefix": lambda: Attention(24, 4, mask=Causal() | Prefix(2)),
    "sparse weights": lambda: Attention(24, 4, normalize=Sparsemax()),
    "entmax": lambda: Attention(24, 4, normalize=Entmax(1.5)),
    "hard": lambda: Attention(24, 4, normalize=Hard()),
    "slots": lambda: Attention(24, 4, slots=2, dropout=0.3),
    "latent": lambda: LatentAttention(24, 4, latent=8, head_dim=6, rotary_dim=4, mask=Causal()),
    "encoder": lambda: EncoderBlock(Attention(24, 4), FeedForward(24, 32)),
    "decoder": lambda: DecoderBlock(Attention(24, 4, mask=Causal()), Attention(24, 4), FeedForward(24, 32)),
    "nn.MultiheadAttention": lambda: nn.MultiheadAttention(24, 4, dropout=0.2),
    "batch first": lambda: nn.MultiheadAttention(24, 4, batch_first=True, add_bias_kv=True),
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(24, 4, 32, batch_first=True),
    "nn.TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(24, 4, 32),
    "nn.Transformer": lambda: nn.Transformer(24, 4, 1, 1, 32, batch_first=True),
    "GPT": lambda: Gpt(GptConfig(vocabulary=30, dim=24, heads=4, depth=2, length=64)),
    "BERT": lambda: Bert(BertConfig(vocabulary=30, dim=24, heads=4, depth=2, length=64)),
    "kernel": lambda: lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v),
    "attend": lambda: lambda q, k, v: regard.attend(q, k, v, mask=Causal()),
}


CORE_LAYERS = ("plain", "grouped, rotary, causal", "prefix", "hard", "nn.MultiheadAttention", "kernel")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CORE_LAYERS else pytest.mark.thorough) for name in LAYERS]
)
def test_layers_of_regard_and_of_pytorch_have_no_finding(name):
    torch.manual_seed(0)
    report = regard.check(LAYERS[name]())
    assert report.findings == (), str(report)
    assert len(report.passed) >= 5


class SplitByView(Tutorial):
    def split(self, x):
        return x.view(x.shape[0], self.heads, x.shape[1], -1)


class Cross(Tutorial):
    """Attention to another sequence only; a mask b n of its real tokens."""

    def forward(self, x, context, mask=None):
        q, k, v = self.split(self.w_q(x)), self.split(self.w_k(context)), self.split(self.w_v(context))
        A = self.normalize(self.hide(self.scores(q, k), None if mask is None else mask[:, None, None]))
        return self.w_o(self.merge(A @ v))


class CrossOverQueries(Cross):
    def normalize(self, scores):
        return scores.softmax(-2)


class ViewedBlocks(nn.Module):
    """Two causal blocks, whose heads are merged by view: after them every token reaches every output."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MergedByView() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize(
    ("make", "name"),
    [(SplitByView, "unmet-tokens"), (CrossOverQueries, "softmax-axis"), (ViewedBlocks, "future-leak"), (Cross, None)],
)
def test_the_queries_and_the_weights_show_what_outputs_hide(make, name):
    torch.manual_seed(0)
    report = regard.check(make())
    assert [finding.name for finding in report.findings] == ([] if name is None else [name])
    if make is Cross:
        assert "attention to context only, so tokens need not meet each other" in report.assumed
        assert "padding" in report.passed


def test_what_was_assumed_and_not_checked_is_in_the_report():
    report = regard.check(Tutorial())
    assert any(text.startswith("not causal") for text in report.assumed)
    assert any(text.startswith("mask: True means attend") for text in report.assumed)
    assert report.not_checked["cache"] == "forward has no cache argument"
    assert set(report.passed) | report.not_checked.keys() == CHECKS.keys()
    text = str(report)
    assert text.startswith("Tutorial, 3 texts of 7 tokens, vectors 24 wide, float64: no finding")
    assert "not checked:" in text


def test_arguments_say_what_cannot_be_known():
    assert [finding.name for finding in regard.check(Tutorial(), causal=True).findings] == ["future-leak"]
    assert [finding.name for finding in regard.check(Tutorial(), true_means="hide").findings] == ["reversed-mask"]
    make, _ = BUGS["scale"][0]
    assert regard.check(make(), ignore=["scale"])
    swapped = nn.MultiheadAttention(DIM, HEADS)
    wrapped = nn.Sequential(swapped)
    wrapped.forward = lambda x: swapped(x, x, x)[0]
    assert regard.check(wrapped, dim=DIM, batch_first=False)
    assert not regard.check(wrapped, dim=DIM)


def test_an_example_input_says_what_a_module_reads():
    def attention(x):
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    assert regard.check(attention, torch.randn(1, 2, 9, 8))
    assert "vectors 10 wide" in regard.check(lambda x: x.softmax(-1) @ x.mT @ x, torch.randn(1, 9, 10)).subject


def test_the_module_stays_as_it_is():
    layer = Tutorial().train()
    before = [x.clone() for x in layer.parameters()]
    state = torch.get_rng_state()
    regard.check(layer)
    assert layer.training
    assert all(x.dtype == torch.float32 and torch.equal(x, y) for x, y in zip(layer.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: regard.check(Tutorial(), ignore=["leak"]), "ignore must hold names of checks, got 'leak'"),
        (lambda: regard.check(Tutorial(), true_means="see"), "true_means must be 'attend' or 'hide', got 'see'"),
        (lambda: regard.check(Tutorial(), dim=7), "Tutorial could not be called: vectors of width 7: RuntimeError"),
        (lambda: regard.check(nn.functional.scaled_dot_product_attention), "shows no signature; pass lambda q, k, v"),
        (lambda: regard.check(nn.Conv1d(3, 3, 3)), "Conv1d could not be called: .* Pass an example input"),
    ],
)
def test_bad_arguments_are_refused_with_the_next_step(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_weights_of_zeros_are_not_passed_in_silence():
    layer = Tutorial()
    nn.init.zeros_(layer.w_o.weight)
    report = regard.check(layer)
    assert "no token changes any output" in report.not_checked["unmet-tokens"]
    assert "unmet-tokens" not in report.passed


def test_the_report_in_the_guide_is_what_its_code_prints(capsys):
    text = (Path(__file__).parents[3] / "docs" / "guides" / "own_layer.md").read_text(encoding="utf8")
    code, report = (
        re.search(f"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1] for kind in ("python", "text")
    )
    exec(code, {"__name__": "guide"})
    printed = capsys.readouterr().out.splitlines()
    assert printed[: len(report.splitlines())] == report.splitlines()


class Asked(nn.Module):
    """A layer for one step of a decoder: its query is one vector for a text."""

    def __init__(self, axis=-1, keys=None, fill=-torch.inf):
        super().__init__()
        self.query, self.key, self.score = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(8, 1)
        self.axis, self.keys, self.fill = axis, keys, fill

    def forward(self, query, keys, mask=None):
        keys = keys[:, : self.keys]
        scores = self.score(torch.tanh(self.query(query)[:, None] + self.key(keys)))[..., 0]
        if mask is not None:
            scores = scores.masked_fill(~mask[:, : self.keys], self.fill)
        A = scores.softmax(self.axis)
        return (A[:, None] @ keys)[:, 0], A


def test_a_layer_whose_query_is_one_vector_is_checked():
    report = regard.check(Asked())
    assert not report.findings
    assert {"unmet-tokens", "softmax-axis", "padding", "reversed-mask", "dropout"} <= set(report.passed)


@pytest.mark.parametrize(
    ("settings", "name"), [({"keys": -1}, "unmet-tokens"), ({"fill": -0.5}, "padding"), ({"axis": 0}, "padding")]
)
def test_bugs_of_a_layer_whose_query_is_one_vector_are_found(settings, name):
    assert name in [finding.name for finding in regard.check(Asked(**settings)).findings]


def test_models_of_audio_are_checked_by_an_example():
    transformers = pytest.importorskip("transformers")
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8, "vocab_size": 99}
    sizes |= {"max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1}
    config = transformers.WhisperConfig(**sizes, eos_token_id=2, decoder_start_token_id=1)
    report = regard.check(transformers.WhisperModel(config), torch.randn(1, 8, 40))
    assert len(report.passed) == len(CHECKS)
    encoder = regard.check(transformers.WhisperModel(config).encoder, torch.randn(1, 8, 40))
    assert not encoder.findings
    assert "recordings" in str(encoder)
