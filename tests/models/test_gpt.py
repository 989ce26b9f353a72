"""Gpt: cached steps equal the whole pass, padding and windows included; decoding equals transformers' generate."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.decode import beam, greedy, sample, score
from regard.models import Gpt, GptConfig
from regard.models.pretrained import load
from tests.decode.tiny_generators import END, LENGTHS, NEW, VOCABULARY, cut, gpt, prompts

D = torch.float64
KINDS = {
    "learned": GptConfig(vocabulary=23, length=40, dim=12, depth=2, heads=3),
    "rotary": GptConfig.llama(vocabulary=23, dim=16, depth=2, heads=4, kv_heads=2),
    "window": GptConfig.llama(vocabulary=23, dim=16, depth=2, heads=4, kv_heads=1, window=5),
    "learned window": GptConfig(vocabulary=23, length=40, dim=12, depth=2, heads=3, kv_heads=1, window=3, tied=False),
}


def model_of(kind):
    model = Gpt(KINDS[kind]).to(D).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def close(x, y, tolerance=1e-10):
    assert not x.isnan().any()
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def cuts(n):
    """A random way to read n tokens in pieces."""
    pieces = []
    while n:
        pieces.append(int(torch.randint(1, n + 1, ())))
        n -= pieces[-1]
    return pieces


@pytest.mark.thorough
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_any_chunking_through_the_cache_equals_the_whole_pass(kind):
    model, ids = model_of(kind), torch.randint(0, 23, (3, 19))
    whole = model(ids)
    for _ in range(200):
        state, found = model.start(), []
        for piece in ids.split(cuts(19), 1):
            logits, state = model.step(piece if piece.shape[1] > 1 else piece[:, 0], state)
            found.append(logits if logits.ndim == 3 else logits[:, None])
        close(torch.cat(found, 1), whole)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind, side):
    model, ids = model_of(kind), torch.randint(0, 23, (3, 13))
    lengths = torch.tensor([13, 1, 8])
    keep = torch.arange(13) < lengths[:, None]
    keep = keep.flip(1) if side == "left" else keep
    out = model(ids, keep=keep)
    for row in range(3):
        close(out[row, keep[row]], model(ids[row, keep[row]][None])[0])
    if side == "right":
        assert torch.equal(model(ids, keep=lengths)[keep], out[keep])


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(9, 2, 6), (9, 0, 6), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_left_padded_prompts_go_on_as_if_they_stood_alone(kind, lengths):
    model, ids, more = model_of(kind), torch.randint(0, 23, (3, 9)), torch.randint(0, 23, (3, 8))
    keep = (torch.arange(9) < torch.tensor(lengths)[:, None]).flip(1)
    state, found = model.start((ids, keep)), []
    for token in more.unbind(1):
        logits, state = model.step(token, state)
        found.append(logits)
    for row in range(3):
        alone = model(torch.cat((ids[row, keep[row]], more[row]))[None])[0]
        close(torch.stack(found, 1)[row], alone[-8:])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_may_be_stepped_from_twice_and_selected_late(kind):
    model = model_of(kind)
    ids, a, b = (torch.randint(0, 23, (3, n)) for n in (7, 4, 5))
    _, state = model.step(ids, model.start())
    first, after = model.step(a, state)
    close(model.step(b, state)[0], model(torch.cat((ids, b), 1))[:, 7:])
    close(model.step(a, state)[0], first)
    rows = torch.tensor([2, 2, 0, 1])
    close(model.step(b[rows], state.select(rows))[0], model(torch.cat((ids, b), 1)[rows])[:, 7:])
    close(model.step(b[rows], after.select(rows))[0], model(torch.cat((ids, a, b), 1)[rows])[:, 11:])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_future_leaves_the_past_as_it_is(kind):
    model, ids = model_of(kind), torch.randint(0, 23, (2, 11))
    other = ids.clone()
    other[:, 7:] = (ids[:, 7:] + 5) % 23
    assert torch.equal(model(ids)[:, :7], model(other)[:, :7])
    assert not torch.allclose(model(ids)[:, 7], model(other)[:, 7])


@torch.no_grad()
def test_a_window_bounds_what_a_layer_remembers():
    model, ids = model_of("window"), torch.randint(0, 23, (1, 30))
    _, state = model.step(ids, model.start())
    assert {cache.kept for cache in state.caches} == {4}
    far = ids.clone()
    far[:, 0] = (far[:, 0] + 1) % 23
    out, other = model(ids), model(far)
    assert not torch.allclose(out[:, 8], other[:, 8])  # two layers of four steps back
    assert torch.equal(out[:, 9:], other[:, 9:])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_attention_comes_through_the_search(kind):
    model, prefix = model_of(kind), torch.randint(0, 23, (2, 6))
    found = beam(model.watched("self.1"), None, prefix, width=3, end=None, max_length=5)
    plain = beam(model, None, prefix, width=3, end=None, max_length=5)
    assert [best[0].tokens for best in found] == [best[0].tokens for best in plain]
    for row, best in enumerate(found):
        ids = torch.cat((prefix[row], torch.tensor(best[0].tokens)))[None, :-1]
        inputs = []
        hook = model.blocks[1].attention.register_forward_pre_hook(
            lambda module, args, inputs=inputs: inputs.append(args[0])
        )
        model(ids)
        hook.remove()
        A = model.blocks[1].attention.weights(inputs[0])[...][0, :, 5:]
        assert best[0].attention.keys() == {"self.1"}
        close(best[0].attention["self.1"], A.to(best[0].attention["self.1"].dtype))


def test_attention_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"no attention is named 'cross.0'; pass one of self.0, self.1"):
        model_of("rotary").watched("cross.0")
    assert model_of("rotary").watched().names == ("self.0", "self.1")


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_may_be_padded_anywhere(kind):
    model, ids, more = model_of(kind), torch.randint(0, 23, (3, 9)), torch.randint(0, 23, (3, 4))
    keep = torch.rand(3, 9) < 0.6
    keep[0] = torch.arange(9) < 5
    logits, _ = model.step(more, model.start((ids, keep)))
    for row in range(3):
        close(logits[row], model(torch.cat((ids[row, keep[row]], more[row]))[None])[0, -4:])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_different_lengths_are_decoded_as_if_each_stood_alone(kind):
    model = model_of(kind)
    prompts = [torch.randint(3, 23, (n,)).tolist() for n in (9, 1, 4, 14)]
    limits = {"end": 0, "max_length": 9}
    alone = [greedy(model, None, [prompt], **limits)[0].tokens for prompt in prompts]
    assert [one.tokens for one in greedy(model, None, prompts, **limits)] == alone
    alone = [[x.tokens for x in sample(model, None, [p], seed=5 + n, **limits)[0]] for n, p in enumerate(prompts)]
    assert [[x.tokens for x in each] for each in sample(model, None, prompts, seed=5, **limits)] == alone
    limits |= {"width": 3, "n_best": 2, "no_repeat": 2}
    alone = [[x.tokens for x in beam(model, None, [p], **limits)[0]] for p in prompts]
    assert [[x.tokens for x in each] for each in beam(model, None, prompts, **limits)] == alone
    targets = [[[4, 5, 6], [7]]] * 4
    ranked = score(model, None, prompts, targets)
    for found, p in zip(ranked, prompts, strict=True):
        (one,) = score(model, None, [p], targets[:1])
        close(torch.tensor([x.score for x in found]), torch.tensor([x.score for x in one]))


def test_prompts_of_different_lengths_are_read_in_one_pass_without_padding(monkeypatch):
    model, read = model_of("rotary"), []
    embed = model.tokens.forward
    monkeypatch.setattr(model.tokens, "forward", lambda ids: (read.append(tuple(ids.shape)), embed(ids))[1])
    greedy(model, None, [[3, 4, 5, 6, 7], [8], [9, 10]], end=None, max_length=2)
    assert read == [(1, 4 + 0 + 1), (3, 1), (3, 1)]


def test_loss_is_that_of_each_token_but_the_first_and_of_no_padding():
    model, ids = model_of("rotary"), torch.randint(0, 23, (3, 9))
    lengths = torch.tensor([9, 4, 6])
    loss = model.loss({"ids": ids, "ids_lengths": lengths})
    expected = torch.zeros((), dtype=D)
    for row, n in zip(ids, lengths, strict=True):
        expected = expected + F.cross_entropy(model(row[None, : n - 1])[0], row[1:n], reduction="sum")
    assert loss.count == 8 + 3 + 5
    close(loss.sum, expected)
    padded = F.pad(ids, (0, 4), value=22)
    close(model.loss({"ids": padded, "ids_lengths": lengths}).sum, loss.sum)


@pytest.mark.learning
@pytest.mark.parametrize("kind", ["learned", "window"])
def test_a_handful_of_texts_is_learnt_by_heart(kind):
    model = Gpt(KINDS[kind]).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = torch.cat((torch.arange(4)[:, None], torch.randint(4, 23, (4, 8))), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model.loss({"ids": ids}).mean
        loss.backward()
        optimizer.step()
    assert loss < 0.02
    found = greedy(model.eval(), None, ids[:, :1], end=None, max_length=8)
    assert [one.tokens for one in found] == [tuple(row) for row in ids[:, 1:].tolist()]


@pytest.mark.learning
def test_it_learns_to_copy():
    model, n = Gpt(GptConfig.llama(vocabulary=12, dim=32, depth=2, heads=4)).train(), 5

    def copies(b, seed):
        some = torch.randint(1, 12, (b, n), generator=torch.Generator().manual_seed(seed))
        return torch.cat((some, torch.zeros(b, 1, dtype=torch.long), some), 1)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 150)
        optimizer.zero_grad()
        model.loss({"ids": copies(64, step)}).mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    test = copies(200, 10_000)
    found = greedy(model.eval(), None, test[:, : n + 1], end=None, max_length=n)
    right = [one.tokens == tuple(row) for one, row in zip(found, test[:, n + 1 :].tolist(), strict=True)]
    assert sum(right) >= 198


@pytest.mark.parametrize(
    ("preset", "millions"), [(GptConfig.small(), 124), (GptConfig.medium(), 355), (GptConfig.large(), 774)]
)
def test_presets_have_the_published_size(preset, millions):
    with torch.device("meta"):
        model = Gpt(preset)
    assert round(sum(x.numel() for x in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocabulary": 0}, "vocabulary must be 1 or more, got 0"),
        ({"norm": "batch"}, "norm must be one of 'layer', 'rms', got 'batch'"),
        ({"positions": "none"}, "positions must be one of 'learned', 'rotary', got 'none'"),
        ({"activation": "sine"}, "activation must be one of .* got 'sine'"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"eps": -1.0}, "eps must be 0 or more, got -1.0"),
        ({"eps": float("nan")}, "eps must be finite, got nan"),
        ({"eps": "small"}, "eps must be a number, got 'small'"),
        ({"tied": "no"}, "tied must be True or False, got 'no'"),
        ({"gated": 1}, "gated must be True or False, got 1"),
        ({"stretch": 1}, r"stretch must be a Stretch, LinearStretch, .* or None, got 1; write Stretch\(factor=8.0\)"),
        ({"heads": 5}, "dim must be a multiple of heads"),
        (
            {"heads": 4, "positions": "rotary"},
            r"dim must be a multiple of 2 \* heads, got dim=12 and heads=4; pass dim=16",
        ),
        ({"biased": "xyz"}, "biased must contain only letters of 'qkvof', got 'xyz'"),
        ({"biased": 1}, "biased must contain only letters of 'qkvof', got 1"),
        ({"biased": "vq"}, "biased must have letters in the order of 'qkvof', got 'vq'; write 'qv'"),
    ],
)
def test_configs_that_cannot_be_are_refused(values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Gpt(GptConfig(**{"vocabulary": 9, "dim": 12, "heads": 3, **values}))


def test_padding_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"keep must be lengths \(b,\) or keep \(b, n\).* for ids \(2, 5\), got"):
        model_of("rotary")(torch.zeros(2, 5, dtype=torch.long), keep=torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("size", ["hidden", "kv_heads", "head_dim", "window"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_that_cannot_be_are_refused_before_a_model_is_built(size, value):
    with pytest.raises(ValueError, match=f"{size} must be 1 or more, got {value}"):
        GptConfig(**{"vocabulary": 9, size: value})


@pytest.mark.parametrize(
    ("padding", "error", "message"),
    [
        ([9, 2], ValueError, "must be one number per row, from 0 to 4, for 2 rows, got 9"),
        ([-3, 2], ValueError, "must be one number per row, from 0 to 4, for 2 rows, got -3"),
        ([2], ValueError, "must be one number per row, from 0 to 4, for 2 rows, got 1 numbers"),
        ([2.0, 2.0], TypeError, "must hold whole numbers, got torch.float32; write x.long()"),
    ],
    ids=str,
)
def test_lengths_are_of_the_rows(padding, error, message):
    model, ids = model_of("rotary"), torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(error, match=f"keep {message}"):
        model(ids, keep=torch.tensor(padding))
    with pytest.raises(error, match=f"ids_lengths {message}"):
        model.loss({"ids": ids, "ids_lengths": torch.tensor(padding)})


def test_a_loss_takes_lengths_and_no_keep():
    ids, keep = torch.zeros(2, 4, dtype=torch.long), torch.tensor([[False, False, True, True], [True] * 4])
    with pytest.raises(
        TypeError, match=r"ids_lengths must be the number of real .* got torch.bool \(2, 4\); write keep.sum\(1\)"
    ):
        model_of("rotary").loss({"ids": ids, "ids_lengths": keep})


def test_ids_are_rows_of_tokens():
    model = model_of("learned")
    for call in (model, model.start, lambda ids: model.loss({"ids": ids})):
        with pytest.raises(ValueError, match=r"must have dims b n, got shape \(2,\); write (ids|source)\[None\]"):
            call(torch.tensor([1, 2]))
        for token in (23, -1):
            with pytest.raises(ValueError, match=f"ids must be from 0 to 22, the rows of this table, got {token}; enc"):
                call(torch.tensor([[3, token, 5]]))
    with pytest.raises(ValueError, match="the batch must hold 'ids', got 'id'; add 'ids'"):
        model.loss({"id": torch.tensor([[1, 2]])})


# Against transformers


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """The same GPT-2, theirs and ours."""
    theirs = gpt()
    folder = tmp_path_factory.mktemp("gpt2")
    theirs.save_pretrained(folder)
    return theirs, load(folder)


def given(lengths):
    """Random ids padded on the left, and where they are not padding."""
    ids, keep = prompts(lengths, "left")
    return ids, keep.bool()


def generated(theirs, ids, keep, **options):
    out = theirs.generate(ids, attention_mask=keep.long(), do_sample=False, max_new_tokens=NEW, **options)
    return cut(out[:, ids.shape[1] :])


@pytest.mark.parametrize("padding", LENGTHS)
def test_greedy_equals_generate(peers, padding):
    theirs, ours = peers
    ids, keep = given(LENGTHS[padding])
    expected = generated(theirs, ids, keep, num_beams=1)
    at_once = greedy(ours, (ids[:, :-1], keep[:, :-1]), ids[:, -1:], end=END, max_length=NEW)
    ragged = [row[kept] for row, kept in zip(ids, keep, strict=True)]
    as_prefix = greedy(ours, None, ragged, end=END, max_length=NEW)
    assert [one.tokens for one in at_once] == [one.tokens for one in as_prefix] == expected
    assert len(set(map(len, expected))) > 1


@pytest.mark.parametrize("padding", LENGTHS)
def test_beam_equals_generate_down_to_the_third_best(peers, padding):
    theirs, ours = peers
    ids, keep = given(LENGTHS[padding])
    expected = generated(theirs, ids, keep, num_beams=5, num_return_sequences=3, length_penalty=0.0)
    found = beam(ours, (ids[:, :-1], keep[:, :-1]), ids[:, -1:], width=5, n_best=3, end=END, max_length=NEW)
    assert [one.tokens for best in found for one in best] == expected


def test_scores_are_those_of_one_pass(peers):
    _, ours = peers
    ids, _ = given([6, 6])
    targets = torch.randint(0, VOCABULARY, (2, 4))
    found = score(ours, None, ids, [[row] for row in targets.tolist()])
    logits = ours(torch.cat((ids, targets), 1))[:, 5:-1].double().log_softmax(-1)
    expected = logits.gather(2, targets[..., None]).sum((1, 2))
    close(torch.tensor([one[0].log_probability for one in found], dtype=D), expected.detach(), 1e-4)


@pytest.mark.compiled
def test_a_compiled_loss_serves_another_size_and_any_length():
    """One process, two sizes and three lengths: each size compiles for one length and then once for all others."""
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    compiled = [stats["unique_graphs"]]
    for dim in (16, 24):
        config = GptConfig(vocabulary=31, length=64, dim=dim, depth=1, heads=2, dropout=0.0, attention_dropout=0.0)
        model = Gpt(config)
        loss = torch.compile(model.loss, backend="aot_eager")
        for n in (20, 33, 28, 45):
            ids = torch.randint(31, (3, n))
            model.zero_grad()
            loss({"ids": ids}).mean.backward()
            found = model.tokens.table.weight.grad.clone()
            model.zero_grad()
            model.loss({"ids": ids}).mean.backward()
            torch.testing.assert_close(found, model.tokens.table.weight.grad)
        compiled.append(stats["unique_graphs"])
    first, second, third = compiled
    assert second - first <= 2
    assert third - second <= 2
