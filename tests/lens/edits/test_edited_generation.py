"""Edits while a model generates: every step equals one pass over the whole text under the same edit."""

import pytest
import torch

from regard.lens import Boost, Cut, Scale, capture, edit, generated

tiny = pytest.importorskip("tests.lens.tiny_transformers")

PROMPT = torch.tensor([[5, 9, 11, 7, 8], [0, 0, 23, 12, 31]])
MASK = (PROMPT != 0).long()
NEW = 6
EDITS = [Boost(2, 1.5, queries=slice(4, None)), Scale(1, 0)]
OPTIONS = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def generate(model, **options):
    with torch.no_grad():
        return model.generate(PROMPT, attention_mask=MASK, **OPTIONS, **options)


@pytest.mark.parametrize("kind", [tiny.llama, tiny.gpt2, tiny.mistral], ids=["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str)
def test_a_generation_under_edits_is_that_of_a_pass_over_the_whole_text(kind, options):
    model = tiny.made(kind)
    cut = Cut(queries=slice(5, None) if "use_cache" in options else generated, keys=slice(0, 2))
    with edit(model, {"*": [cut, *EDITS]}):
        found = generate(model, **options)
    assert not torch.equal(found, generate(model, **options))
    for row, text in enumerate(found):  # one at a time, without padding
        prompt = int(MASK[row].sum())
        ids = text[len(MASK[row]) - prompt :]
        behind = Cut(queries=slice(5 if "use_cache" in options else prompt, None), keys=slice(0, 2))
        with torch.no_grad(), edit(model, {"*": [behind, *EDITS]}):
            logits = model(ids[None]).logits[0, :-1]
        chosen = logits.gather(1, ids[1:, None])[:, 0]
        assert (logits.amax(1) - chosen)[prompt - 1 :].max() < 1e-4


@pytest.mark.parametrize("kind", [tiny.marian, tiny.t5], ids=["marian", "t5"])
def test_cross_attention_is_edited_at_every_step(kind):
    model = tiny.made(kind)
    cross = "*decoder*.encoder_attn" if kind is tiny.marian else "*.EncDecAttention"
    edits = {cross: Cut(queries=slice(2, None), keys=-1)}
    with edit(model, edits), capture(model, layers=cross) as tape:
        found = generate(model)
    A = tape[0].dense()
    assert not A[:, :, 2:, -1].any()
    assert (A[:, :, :2, -1] > 0).all()
    with torch.no_grad(), edit(model, edits):
        logits = model(input_ids=PROMPT, attention_mask=MASK, decoder_input_ids=found[:, :-1]).logits
    chosen = logits.gather(2, found[:, 1:, None])[..., 0]
    assert (logits.amax(-1) - chosen)[:, -NEW:].abs().max() < 1e-4


def test_beams_are_edited_as_their_texts():
    model = tiny.made(tiny.llama)
    with edit(model, {"*": [Cut(queries=generated, keys=0), *EDITS]}):
        found = generate(model, num_beams=3)
    assert found.shape == (2, 5 + NEW)
