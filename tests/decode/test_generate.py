"""Greedy and beam search give what transformers' `generate` gives, token for token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from regard.decode import beam, greedy, sample, score
from tests.decode.tiny_generators import END, LENGTHS, NEW, PAD, PROMPTS, VOCABULARY, cut, gpt, prompts

transformers = pytest.importorskip("transformers")

# What a beam of generate keeps to: exact stopping, and the mean or the sum of log-probabilities.
MEAN = {"length_penalty": 1.0, "early_stopping": "never"}
SUM = {"length_penalty": 0.0}


@dataclass(frozen=True)
class GptState:
    cache: tuple[tuple[Tensor, Tensor], ...]
    keep: Tensor

    def select(self, rows):
        return GptState(tuple((k[rows], v[rows]) for k, v in self.cache), self.keep[rows])


class Gpt:
    """A GPT-2 of transformers as a stepper: the source is a left-padded prompt and its mask, less the last token."""

    def __init__(self, model):
        self.model = model

    def start(self, source):
        ids, keep = source
        state = GptState((), keep[:, :0])
        return self._read(ids, keep, state)[1] if ids.shape[1] else state

    def step(self, tokens, state):
        ids = tokens.view(len(tokens), -1)
        logits, state = self._read(ids, torch.ones_like(ids), state)
        return logits.view(*tokens.shape, -1), state

    def _read(self, ids, keep, state):
        keep = torch.cat([state.keep, keep], 1)
        cache = transformers.DynamicCache(state.cache or None)
        places = (keep.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(ids, attention_mask=keep, position_ids=places, past_key_values=cache, use_cache=True)
        return out.logits, GptState(tuple((layer.keys, layer.values) for layer in cache.layers), keep)


@dataclass(frozen=True)
class MarianState:
    memory: Tensor
    keep: Tensor
    read: Tensor
    attention: dict[str, Tensor]

    def select(self, rows):
        return replace(self, memory=self.memory[rows], keep=self.keep[rows], read=self.read[rows])


class Marian:
    """A Marian model of transformers as a stepper: the source is padded ids and their mask."""

    def __init__(self, model):
        self.model = model

    def start(self, source):
        ids, keep = source
        memory = self.model.get_encoder()(ids, attention_mask=keep).last_hidden_state
        return MarianState(memory, keep, ids[:, :0], {})

    def step(self, tokens, state):
        new = tokens.view(len(tokens), -1)
        read = torch.cat([state.read, new], 1)
        out = self.model(
            encoder_outputs=(state.memory,), attention_mask=state.keep, decoder_input_ids=read, output_attentions=True
        )
        logits = out.logits[:, -new.shape[1] :]
        seen = {f"{n}.cross": x[:, :, -new.shape[1] :] for n, x in enumerate(out.cross_attentions)}
        if tokens.ndim == 1:
            logits, seen = logits[:, 0], {name: x[:, :, 0] for name, x in seen.items()}
        return logits, replace(state, read=read, attention=seen)


def marian():
    torch.manual_seed(5)
    config = transformers.MarianConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=64,
        init_std=0.4,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.MarianMTModel(config).eval()
    # Fresh weights say the same whatever they read: louder inputs, and an end that is within reach.
    with torch.no_grad():
        model.final_logits_bias[0, END] = 2.0
        for part in (model.model.encoder, model.model.decoder):
            part.embed_tokens.weight.copy_(4 * model.model.shared.weight)
        for layer in model.model.decoder.layers:
            layer.self_attn.out_proj.weight *= 6
            layer.encoder_attn.out_proj.weight *= 4
            layer.encoder_attn.q_proj.weight *= 3
    return model


@pytest.fixture(scope="module", params=["gpt2", "marian"])
def peer(request):
    """A model, it as a stepper, and how prompts become its arguments and ours."""
    if request.param == "gpt2":
        model = gpt()
        return SimpleNamespace(
            model=model,
            stepper=Gpt(model),
            side="left",
            source=lambda ids, keep: (ids[:, :-1], keep[:, :-1]),
            prefix=lambda ids: ids[:, -1:],
            new=lambda ids, out: out[:, ids.shape[1] :],
        )
    model = marian()
    return SimpleNamespace(
        model=model,
        stepper=Marian(model),
        side="right",
        source=lambda ids, keep: (ids, keep),
        prefix=lambda ids: torch.full((len(ids), 1), PAD),
        new=lambda ids, out: out[:, 1:],
    )


def theirs(peer, ids, keep, **options):
    out = peer.model.generate(ids, attention_mask=keep, do_sample=False, max_new_tokens=NEW, **options)
    return cut(peer.new(ids, out))


@pytest.mark.parametrize("padding", LENGTHS)
@pytest.mark.parametrize("least", [0, 5])
def test_greedy_equals_generate(peer, padding, least):
    ids, keep = prompts(LENGTHS[padding], peer.side)
    expected = theirs(peer, ids, keep, num_beams=1, min_new_tokens=least)
    source, prefix = peer.source(ids, keep), peer.prefix(ids)
    found = greedy(peer.stepper, source, prefix, end=END, max_length=NEW, min_length=least)
    assert [one.tokens for one in found] == expected
    assert len(set(map(len, expected))) > 1


@pytest.mark.parametrize("padding", LENGTHS)
@pytest.mark.parametrize(
    ("options", "length", "least"), [(SUM, None, 0), (MEAN, float, 0), (SUM, None, 5)], ids=["sum", "mean", "min"]
)
def test_beam_equals_generate_down_to_the_third_best(peer, padding, options, length, least):
    ids, keep = prompts(LENGTHS[padding], peer.side)
    expected = theirs(peer, ids, keep, num_beams=5, num_return_sequences=3, min_new_tokens=least, **options)
    source, prefix = peer.source(ids, keep), peer.prefix(ids)
    limits = {"end": END, "max_length": NEW, "min_length": least}
    found = beam(peer.stepper, source, prefix, width=5, n_best=3, length=length, **limits)
    assert [one.tokens for best in found for one in best] == expected
    assert length is float or len(set(map(len, expected))) > 1


def test_beam_scores_equal_those_of_generate(peer):
    ids, keep = prompts(LENGTHS["padded"], peer.side)
    out = peer.model.generate(
        ids,
        attention_mask=keep,
        num_beams=4,
        do_sample=False,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_scores=True,
        **MEAN,
    )
    source, prefix = peer.source(ids, keep), peer.prefix(ids)
    found = beam(peer.stepper, source, prefix, width=4, end=END, max_length=NEW, length=float)
    scores = torch.tensor([best[0].score for best in found])
    torch.testing.assert_close(scores, out.sequences_scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("repeat", [None, 1, 2, 3])
def test_a_prompt_as_prefix_equals_generate(repeat):
    model = gpt()
    ids, keep = prompts([7] * 20, "left")
    options = {"attention_mask": keep, "do_sample": False, "max_new_tokens": NEW, "no_repeat_ngram_size": repeat or 0}
    nothing = ids[:, :0], keep[:, :0]
    expected = cut(model.generate(ids, num_beams=1, **options)[:, 7:])
    found = greedy(Gpt(model), nothing, ids, end=END, max_length=NEW, no_repeat=repeat)
    assert [one.tokens for one in found] == expected
    expected = cut(model.generate(ids, num_beams=4, **SUM, **options)[:, 7:])
    found = beam(Gpt(model), nothing, ids, width=4, end=END, max_length=NEW, no_repeat=repeat)
    assert [best[0].tokens for best in found] == expected


@pytest.mark.parametrize("repeat", [2, 3])
def test_not_repeating_what_was_written_equals_generate(repeat):
    model = marian()
    ids, keep = prompts(LENGTHS["padded"], "right")
    prefix = torch.full((PROMPTS, 1), PAD)
    options = {"attention_mask": keep, "do_sample": False, "max_new_tokens": NEW, "no_repeat_ngram_size": repeat}
    expected = cut(model.generate(ids, num_beams=1, **options)[:, 1:])
    found = greedy(Marian(model), (ids, keep), prefix, end=END, max_length=NEW, no_repeat=repeat)
    assert [one.tokens for one in found] == expected
    expected = cut(model.generate(ids, num_beams=5, **SUM, **options)[:, 1:])
    found = beam(Marian(model), (ids, keep), prefix, width=5, end=END, max_length=NEW, no_repeat=repeat)
    assert [best[0].tokens for best in found] == expected


def test_prompts_of_different_lengths_as_prefix_equal_generate_with_padding():
    model = gpt()
    ids, keep = prompts(LENGTHS["padded"], "left")
    ragged = [row[kept.bool()] for row, kept in zip(ids, keep, strict=True)]
    nothing = ids[:, :0], keep[:, :0]
    options = {"attention_mask": keep, "do_sample": False, "max_new_tokens": NEW}
    expected = cut(model.generate(ids, num_beams=1, **options)[:, ids.shape[1] :])
    assert [one.tokens for one in greedy(Gpt(model), nothing, ragged, end=END, max_length=NEW)] == expected
    expected = cut(model.generate(ids, num_beams=5, **MEAN, **options)[:, ids.shape[1] :])
    found = beam(Gpt(model), nothing, ragged, width=5, end=END, max_length=NEW, length=float)
    assert [best[0].tokens for best in found] == expected


def test_scores_and_attention_are_those_of_one_forward_pass():
    model = marian()
    ids, keep = prompts([3, 6, 4], "right")
    prefix = torch.full((3, 1), PAD)
    found = beam(Marian(model), (ids, keep), prefix, width=4, end=END, max_length=NEW)
    targets = [[one.tokens for one in best] for best in found]
    again = score(Marian(model), (ids, keep), prefix, targets)
    for row, (best, forced) in enumerate(zip(found, again, strict=True)):
        tokens = torch.tensor([[PAD, *best[0].tokens]])
        out = model(
            ids[row : row + 1],
            attention_mask=keep[row : row + 1],
            decoder_input_ids=tokens[:, :-1],
            output_attentions=True,
        )
        expected = out.logits.double().log_softmax(-1)[0].gather(1, tokens[0, 1:, None]).sum()
        for one in (best[0], forced[0]):
            assert one.log_probability == pytest.approx(expected.item(), abs=1e-4)
            assert one.attention.keys() == {"0.cross", "1.cross"}
            for layer in range(2):
                torch.testing.assert_close(one.attention[f"{layer}.cross"], out.cross_attentions[layer][0])


def test_sampling_follows_the_probabilities_generate_would_draw_from():
    model = gpt()
    ids, keep = prompts([5], "left")
    options = {"temperature": 0.7, "top_k": 6, "top_p": 0.8}
    processors = [
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(6),
        transformers.TopPLogitsWarper(0.8),
    ]
    s = model(ids).logits[:, -1]
    for process in processors:
        s = process(ids, s)
    expected = s.softmax(-1)[0]
    found = sample(
        Gpt(model), (ids[:, :-1], keep[:, :-1]), ids[:, -1:], end=None, max_length=1, seed=0, samples=4000, **options
    )
    share = torch.bincount(torch.tensor([one.tokens[0] for one in found[0]]), minlength=VOCABULARY) / 4000
    assert torch.equal(share > 0, expected > 0)
    torch.testing.assert_close(share, expected, atol=0.03, rtol=0)
