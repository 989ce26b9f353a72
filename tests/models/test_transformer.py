"""Transformer: against PyTorch's, step by step and at once, padded and alone, whole and in segments."""

import pytest
import torch
from torch import nn

from regard import Dense, Global, Window
from regard.decode import beam
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn import Attention
from tests.models.generator_checks import (
    END,
    START,
    VOCABULARY,
    B,
    D,
    M,
    N,
    a_row_alone_gives_what_it_gives_in_a_padded_batch,
    a_state_may_be_stepped_from_twice,
    accuracy,
    an_ensemble_of_one_writes_what_the_model_writes,
    any_chunking_gives_what_the_whole_pass_gives,
    batch_order_changes_nothing,
    beam_never_scores_below_greedy,
    begun,
    by_hand,
    logits_of,
    no_logit_sees_the_token_it_predicts,
    pairs,
    row_of,
    stepped,
    trained,
    what_stands_in_the_padding_changes_nothing,
    wrong_batches_are_refused,
    wrong_sources_are_refused,
)
from tests.models.small_transformer import DIM, HEADS, KINDS, config, model_of


@pytest.fixture(params=KINDS)
def model(request):
    return model_of(request.param)


def test_any_chunking_gives_what_the_whole_pass_gives(model):
    any_chunking_gives_what_the_whole_pass_gives(model, pairs(), logits_of(model, pairs()).detach())


def test_a_row_alone_gives_what_it_gives_in_a_padded_batch(model):
    a_row_alone_gives_what_it_gives_in_a_padded_batch(model)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "learned"])
def test_what_stands_in_the_padding_changes_nothing(kind):
    what_stands_in_the_padding_changes_nothing(model_of(kind))


def test_batch_order_changes_nothing(model):
    batch_order_changes_nothing(model)


@pytest.mark.parametrize("rows", [[4, 4, 0, 0, 2, 2], [4, 4, 0, 2, 2, 2], [1], [0, 1, 2, 3, 4], [3, 3, 1, 3]], ids=str)
@torch.no_grad()
def test_the_state_of_selected_rows_is_that_of_their_sources(model, rows):
    batch, rows = pairs(), torch.tensor(rows)
    inputs = begun(batch["target"])
    _, state = model.step(inputs[:, :3], model.start(batch))
    logits, state = model.step(inputs[rows, 3], state.select(rows))
    moved = {name: x[rows] for name, x in batch.items()}
    expected = stepped(model, moved, inputs[rows, :5], [3, 1, 1])
    torch.testing.assert_close(logits, expected[:, 3])
    back = torch.arange(len(rows)).flip(0)  # and once more, from rows that already stand side by side
    logits, _ = model.step(inputs[rows[back], 4], state.select(back))
    torch.testing.assert_close(logits, expected[back, 4])


def test_a_state_may_be_stepped_from_twice(model):
    a_state_may_be_stepped_from_twice(model)


def test_the_loss_is_the_cross_entropy_of_targets_shifted_once(model):
    batch = pairs()
    logits = logits_of(model, batch).detach()
    for mode, smoothing in ((True, 0.1), (False, 0.0)):
        loss = model.train(mode).loss(batch)
        expected = by_hand(logits, batch["target"], batch["target_lengths"], smoothing)
        assert loss.sum.item() == pytest.approx(expected, abs=1e-8)
        assert int(loss.count) == int(batch["target_lengths"].sum())


def test_no_logit_sees_the_token_it_predicts(model):
    no_logit_sees_the_token_it_predicts(model)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_it_equals_the_transformer_of_pytorch_with_its_weights():
    batch = pairs()
    theirs = nn.Transformer(DIM, HEADS, 2, 2, 16, dropout=0.0, batch_first=True, norm_first=True).to(D)
    ours = model_of("pre")
    for here, there in ((ours.encoder, theirs.encoder), (ours.decoder, theirs.decoder)):
        here.norm = there.norm
        for block, layer in zip(here.blocks, there.layers, strict=True):
            block.attention = _masked_as(block.attention, Attention.from_torch(layer.self_attn))
            block.feedforward.up, block.feedforward.down = layer.linear1, layer.linear2
            rounds = [block.around_attention, block.around_feedforward]
            norms = [layer.norm1, layer.norm2]
            if hasattr(block, "cross"):
                block.cross = Attention.from_torch(layer.multihead_attn)
                rounds, norms = [rounds[0], block.around_cross, rounds[1]], [*norms, layer.norm3]
            for around, norm in zip(rounds, norms, strict=True):
                around.norm = norm
    padding = torch.arange(N) >= batch["source_lengths"][:, None]
    inputs = begun(batch["target"])
    causal = nn.Transformer.generate_square_subsequent_mask(M, dtype=D)
    states = theirs(
        ours.encoder.input(batch["source"]),
        ours.decoder.input(inputs),
        tgt_mask=causal,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
        tgt_is_causal=True,
    )
    expected = ours.decoder.input.embedding.logits(states)
    actual = logits_of(ours, batch)
    torch.testing.assert_close(actual, expected)
    weight = theirs.encoder.layers[0].linear1.weight
    mine, other = (torch.autograd.grad(x.square().sum(), weight)[0] for x in (actual, expected))
    torch.testing.assert_close(mine, other)


def _masked_as(layer, other):
    other.mask = layer.mask
    return other


@torch.no_grad()
def test_an_encoder_mask_hides_what_it_says():
    model, batch = model_of("masked"), pairs()
    assert model.encoder.blocks[0].attention.mask == Window(3) | Global(1)
    plain = model_of("pre")
    plain.load_state_dict(model.state_dict())
    i, j = torch.arange(N)[:, None], torch.arange(N)
    keep = ((i - j).abs() < 3) | (i == 0) | (j == 0)
    x = plain.encoder.input(batch["source"])
    for block in plain.encoder.blocks:
        x = block(x, mask=Dense(keep))
    torch.testing.assert_close(model.encoder(batch["source"]), plain.encoder.norm(x))


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "t5", "alibi"])
@pytest.mark.parametrize("memory", [0, 3, 5, 100])
@torch.no_grad()
def test_segments_see_themselves_and_their_memory(positions, memory):
    model = Transformer(config(positions=positions, segment=4, memory=memory)).to(D).eval()
    plain = Transformer(config(positions=positions)).to(D).eval()
    plain.load_state_dict(model.state_dict())
    batch = pairs()
    first = torch.arange(N)[:, None] // 4 * 4
    keep = (torch.arange(N) >= first - memory) & (torch.arange(N) < first + 4)
    x = plain.encoder.input(batch["source"])
    for block in plain.encoder.blocks:
        x = block(x, mask=Dense(keep), keep=batch["source_lengths"])
    expected, actual = plain.encoder.norm(x), model.encoder(batch["source"], batch["source_lengths"])
    real = torch.arange(N) < batch["source_lengths"][:, None]
    torch.testing.assert_close(actual[real], expected[real])


def test_no_gradient_reaches_an_earlier_segment():
    model, batch = model_of("segments"), pairs()
    x = model.encoder.input.embedding.table.weight
    first = batch["source"][:1, :4]
    others = torch.full((1, 5), 22)
    batch["source"][:1] = torch.cat((first.clamp(max=21), others), 1)
    states = model.encoder(batch["source"][:1])
    gradient = torch.autograd.grad(states[:, 4:].square().sum(), x)[0]
    assert gradient[22].abs().sum() > 0
    assert gradient[:22].abs().sum() == 0


def test_tied_embeddings_are_one_table():
    sizes = {
        tied: _count(Transformer(config(source_vocabulary=VOCABULARY, tied=tied))) for tied in ("none", "output", "all")
    }
    table = VOCABULARY * DIM
    assert sizes["none"] - sizes["output"] == sizes["output"] - sizes["all"] == table


def test_presets_are_those_of_the_paper():
    sizes = {"source_vocabulary": 37_000, "target_vocabulary": 37_000, "start": 0}
    with torch.device("meta"):
        base, big = (Transformer(preset(**sizes)) for preset in (TransformerConfig.base, TransformerConfig.big))
    assert [round(_count(model) / 1e6) for model in (base, big)] == [63, 214]  # table 3 says 65 and 213


def test_an_ensemble_of_one_writes_what_the_model_writes():
    an_ensemble_of_one_writes_what_the_model_writes(model_of("pre"))


def test_a_beam_of_a_batch_is_that_of_each_source_alone():
    model, batch = model_of("pre"), pairs()
    found = beam(model, batch, [[START]] * B, width=3, n_best=3, end=END, max_length=8)
    for n in range(B):
        alone = beam(model, row_of(batch, n), [[START]], width=3, n_best=3, end=END, max_length=8)[0]
        assert [one.tokens for one in found[n]] == [one.tokens for one in alone]


@pytest.mark.learning
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_it_learns_a_handful_of_examples_by_heart(norm):
    model, batch = Transformer(config(norm=norm, smoothing=0.0, dim=24, hidden=48)), pairs()
    trained(model, lambda step: batch, steps=100, rate=0.01)
    assert model.loss(batch).mean.item() < 0.02
    assert accuracy(model, batch) == 1.0


@pytest.mark.learning
def test_it_learns_to_copy():
    shape = {"dim": 32, "heads": 2, "hidden": 64, "encoder_layers": 1, "decoder_layers": 1}
    words = {"source_vocabulary": 12, "target_vocabulary": 12}
    model = Transformer(config(**shape, **words, tied="none", smoothing=0.0))
    trained(model, lambda step: copies(128, step), steps=150, rate=0.01)
    assert accuracy(model, copies(200, seed=10_000)) >= 0.99


def test_beam_never_scores_below_greedy():
    words = {"source_vocabulary": 12, "target_vocabulary": 12}
    shape = {"dim": 32, "heads": 2, "hidden": 64, "encoder_layers": 1, "decoder_layers": 1}
    model = Transformer(config(**shape, **words, tied="none", smoothing=0.0))
    trained(model, lambda step: copies(128, step), steps=30, rate=0.01)
    beam_never_scores_below_greedy(model, copies(200, seed=10_000))


def copies(b, seed):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (b,), generator=random)
    source = torch.randint(4, 12, (b, 5), generator=random)
    target = nn.functional.pad(source, (0, 1)).masked_fill(torch.arange(6) == lengths[:, None], END)
    return {"source": source, "source_lengths": lengths, "target": target, "target_lengths": lengths + 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "both"}, "norm must be one of 'pre', 'post', got 'both'"),
        ({"positions": "absolute"}, "positions must be one of 'sinusoidal', .* got 'absolute'"),
        ({"activation": "softplus"}, "activation must be one of 'relu', .* got 'softplus'"),
        ({"tied": "all"}, "tied='all' needs one vocabulary for both sides, got source_vocabulary=23"),
        ({"start": 19}, "start must be a token of the vocabulary of 19, got 19"),
        ({"smoothing": 1.0}, "smoothing must be at least 0 and below 1, got 1.0"),
        ({"memory": 3}, "memory holds states of earlier segments, got memory=3 without segment"),
        (
            {"encoder_mask": "Window(3) | Global(1)", "segment": 4, "memory": 3},
            r"encoder_mask must depend on distance .* got 'Window\(3\) \| Global\(1\)' and memory=3: .* pass memory=0",
        ),
        ({"decoder_layers": 0}, "decoder_layers must be 1 or more, got 0"),
        ({"kv_heads": 0}, "kv_heads must be 1 or more, got 0"),
        ({"longest": 0}, "longest must be 1 or more, got 0"),
        ({"embedding_scale": float("nan")}, "embedding_scale must be finite, got nan"),
        ({"embedding_scale": "x"}, "embedding_scale must be a number, got 'x'"),
        ({"output_bias": "no"}, "output_bias must be True or False, got 'no'"),
        ({"reach": -1}, "reach must be 0 or more, got -1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_configs_that_cannot_be(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        config(**options)


@pytest.mark.parametrize(
    ("mask", "why"), [("Alibi(3)", "write .Window"), ("Windw(3)", "did you mean 'Window'"), ("Window(", "not a term")]
)
def test_an_encoder_mask_that_is_none_raises_before_a_model_is_built(mask, why):
    with pytest.raises(ValueError, match=rf"encoder_mask must be a mask as text, got '{mask[:5]}.*{why}"):
        config(encoder_mask=mask)


def _count(model):
    return sum(x.numel() for x in model.parameters())


def test_wrong_batches_are_refused(model):
    wrong_batches_are_refused(model, pairs())
    wrong_sources_are_refused(model, pairs())
