"""Translators of transformers and ours: equal numbers, gradients and translations."""

from __future__ import annotations

import pytest
import torch

from regard.decode import beam, greedy
from regard.models.pretrained import load, save
from tests.models.pretrained.peers import (
    SEQ2SEQ,
    TRANSLATORS,
    V,
    close,
    peer,
    reconfigure,
    same_gradients,
    saved,
    transformers,
)


@pytest.mark.parametrize("kind", TRANSLATORS)
def test_encoder_decoders_equal_transformers(kind, tmp_path):
    name, values = TRANSLATORS[kind]
    theirs = peer(name, values)
    theirs.final_logits_bias.normal_()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    source, lengths, inputs = torch.randint(2, V, (3, 11)), torch.tensor([11, 4, 7]), torch.randint(2, V, (3, 6))
    keep = torch.arange(11) < lengths[:, None]
    out = ours(source, inputs, source_lengths=lengths)
    expected = theirs(source, attention_mask=keep, decoder_input_ids=inputs).logits
    close(out, expected)
    same_gradients(ours.encoder.input.embedding.table.weight, theirs.model.shared.weight, out, expected)

    save(ours, tmp_path / "ours")
    again = getattr(transformers, name).from_pretrained(tmp_path / "ours").eval()
    close(again(source, attention_mask=keep, decoder_input_ids=inputs).logits, expected)


def test_fields_that_must_agree_are_checked(tmp_path):
    reconfigure(saved(tmp_path, *TRANSLATORS["bart"]), decoder_attention_heads=4)
    with pytest.raises(
        ValueError, match="decoder_attention_heads must be 3, the value of another field for the same size, got 4"
    ):
        load(tmp_path)


PROMPTS, NEW, PAD, END = 50, 12, 1, 0


@pytest.mark.parametrize("padded", [False, True])
def test_translations_equal_generate(padded, tmp_path):
    values = {**SEQ2SEQ, "d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "init_std": 0.5}
    theirs = transformers.MarianMTModel(transformers.MarianConfig(**{**values, "forced_eos_token_id": None})).eval()
    with torch.no_grad():  # so that what is written depends on what is read, and an end is within reach
        theirs.final_logits_bias[0, END] = 1.0
        theirs.model.shared.weight /= theirs.model.shared.weight.norm(dim=1, keepdim=True).clamp(min=1e-6)
        for layer in theirs.model.decoder.layers:
            layer.self_attn.out_proj.weight *= 4
            layer.encoder_attn.out_proj.weight *= 20
            layer.fc2.weight *= 0.3
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    lengths = 2 + torch.arange(PROMPTS) % 9 if padded else torch.full((PROMPTS,), 7)
    keep = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.where(keep, torch.randint(2, V, keep.shape), PAD)
    batch, prefix = {"source": ids, "source_lengths": lengths}, [[PAD]] * PROMPTS

    def generated(**options):
        out = theirs.generate(ids, attention_mask=keep.long(), do_sample=False, max_new_tokens=NEW, **options)
        rows = [row[1:] for row in out.tolist()]
        return [tuple(row[: row.index(END) + 1] if END in row else row) for row in rows]

    expected = generated(num_beams=1)
    assert [one.tokens for one in greedy(ours, batch, prefix, end=END, max_length=NEW)] == expected
    assert len(set(expected)) > 2
    assert len(set(map(len, expected))) > 1
    expected = generated(num_beams=5, num_return_sequences=3, length_penalty=0.0)
    found = beam(ours, batch, prefix, width=5, n_best=3, end=END, max_length=NEW)
    assert [one.tokens for best in found for one in best] == expected
