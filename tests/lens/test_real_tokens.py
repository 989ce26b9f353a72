"""Real tokens and padding as masks show them, and measures that are those of each text alone."""

import pytest
import torch

from regard import (
    Blocks,
    Causal,
    Dense,
    Diagonal,
    Documents,
    Global,
    Near,
    Padding,
    Prefix,
    Rule,
    Sigmoid,
    Window,
    weights,
)
from regard.lens import (
    attention_flow,
    diagonality,
    duplicate_token,
    gradient_attention,
    induction,
    locality,
    norm_attention,
    previous_token,
    relevance,
    rollout,
    rollout_matrix,
    share,
    similarity,
    sinks,
)
from regard.lens import real_tokens as module
from regard.lens.real_tokens import (
    RealTokens,
    SharedRealTokens,
    padding_queries,
    real_keys,
    real_queries,
    real_tokens,
    received_from,
    says_self,
    with_own_queries,
    without_queries,
)
from regard.lens.terms.infer_mask import Packed, Rows

B, H, G, N, D = 3, 4, 2, 12, 6
LENGTHS = (12, 7, 1)
RIGHT = torch.arange(N) < torch.tensor(LENGTHS)[:, None]
LEFT = RIGHT.flip(1)
close = torch.testing.assert_close


def make(i=N, j=N, seed=0, **terms):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, i, D, generator=generator, dtype=torch.float64) * 2
    k = torch.randn(B, G, j, D, generator=generator, dtype=torch.float64)
    return weights(q, k, **terms)


def packed(keep):
    return Packed.of(Rows.of(keep))


def between(keep):
    """Pairs of real tokens, `b 1 i j`: as models write masks of padded queries and keys."""
    return keep[:, None, :, None] & keep[:, None, None, :]


SQUARE = torch.ones(N, N, dtype=torch.bool)
PADDED = {
    "lengths": (Padding(LENGTHS), RIGHT),
    "lengths, a tensor": (Padding(torch.tensor(LENGTHS)), RIGHT),
    "one length for all": (Padding((5,)), (torch.arange(N) < 5).expand(B, N)),
    "right": (Padding(RIGHT), RIGHT),
    "left": (Padding(LEFT), LEFT),
    "causal, right": (Causal() & Padding(RIGHT), RIGHT),
    "causal, left": (Causal() & Padding(LEFT), LEFT),
    "window": (Causal() & Window(3) & Padding(LENGTHS), RIGHT),
    "prefix": (Prefix(torch.tensor(LENGTHS)), RIGHT),
    "prefix that may look ahead": ((Causal() | Prefix(3)) & Padding(LENGTHS), RIGHT),
    "global tokens": ((Window(2) | Global(1)) & Padding(LENGTHS), RIGHT),
    "not": (~Padding(LEFT), ~LEFT),
    "not or": (~(Padding(~RIGHT) | ~Window(30)), RIGHT),
    "not and": (~(Padding(~RIGHT) & Padding((N,))), RIGHT),
    "not not": (~~Padding(LENGTHS), RIGHT),
    "either": (Padding(RIGHT) | Padding(LEFT), RIGHT | LEFT),
    "documents": (Documents(torch.zeros(N, dtype=torch.long), (~RIGHT).long()), RIGHT),
    "documents of one text and padding": (Documents(torch.zeros(1, N, dtype=torch.long)) & Padding(LENGTHS), RIGHT),
    "dense": (Dense(between(RIGHT)), RIGHT),
    "dense, one row": (Dense(LEFT[:, None, None]), LEFT),
    "dense causal": (Dense(between(LEFT) & SQUARE.tril()), LEFT),
    "dense by head": (Dense(between(RIGHT) & torch.tensor([True, False, True, False])[:, None, None]), RIGHT),
    "bits": (packed(between(RIGHT)), RIGHT),
    "function": (Rule(lambda b, h, i, j: j < torch.tensor(LENGTHS)[b]), RIGHT),
    "function and causal": (Causal() & Rule(lambda b, h, i, j: j < torch.tensor(LENGTHS)[b]), RIGHT),
    "blocks": (Blocks(torch.tensor([[True, True, False, False]] * 4), 3), (torch.arange(N) < 6).expand(B, N)),
}


@pytest.mark.parametrize("entries", [2**22, 40])
@pytest.mark.parametrize(("mask", "real"), PADDED.values(), ids=PADDED)
def test_keys_that_no_query_sees_are_padding(mask, real, entries, monkeypatch):
    monkeypatch.setattr("regard.lens.real_tokens.ENTRIES", entries)
    A = make(mask=mask)
    assert torch.equal(real_keys(A), real)
    assert torch.equal(real_queries(A), real)
    assert torch.equal((A.dense() > 0).any(1).any(1), real)
    some = A.select(batch=[2, 1], heads=[0, 2])
    assert torch.equal(real_keys(some), real[[2, 1]])


UNPADDED = {
    "nothing": None,
    "causal": Causal(),
    "strictly causal": Causal() & ~Diagonal(),
    "strictly causal, dense": Dense(SQUARE.tril(-1)),
    "strictly causal, a function": Rule(lambda b, h, i, j: j < i),
    "window": Window(before=0, after=2),
    "near": Near(torch.zeros(N), 2.0),
    "global": Global(2),
    "documents": Documents(torch.tensor([0] * 5 + [1] * 7)),
    "not documents": ~Documents(torch.tensor([0] * 5 + [1] * 7)),
    "prefix or causal": Causal() | Prefix(4),
    "full lengths": Padding((N,)),
    "dense": Dense(SQUARE.triu(-2).tril(2)),
}


@pytest.mark.parametrize("mask", UNPADDED.values(), ids=UNPADDED)
def test_masks_of_positions_hide_no_token(mask):
    A = make(mask=mask)
    assert real_keys(A).all()
    assert real_queries(A).all()
    assert padding_queries(A) is None
    assert real_tokens(A).are_all


def test_the_last_token_of_a_padded_text_is_real_though_no_query_sees_it():
    A = make(mask=Dense(between(RIGHT) & SQUARE.tril(-1)))
    assert torch.equal(real_keys(A), RIGHT)


def test_queries_behind_earlier_keys_are_real_as_their_own_keys():
    A = make(4, N, mask=Causal() & Padding(RIGHT))
    assert torch.equal(real_queries(A), RIGHT[:, -4:])
    late = make(4, N, mask=Causal() & Padding(RIGHT), offset=10)  # two of them stand behind the keys
    assert torch.equal(real_queries(late), torch.cat((RIGHT[:, -2:], torch.ones(B, 2, dtype=torch.bool)), 1))


def test_all_queries_of_another_text_are_real():
    A = make(5, N, mask=Padding(LENGTHS))
    assert real_queries(A).all()
    assert torch.equal(real_keys(A), RIGHT)


def test_leading_dims_are_kept():
    q = torch.randn(2, B, H, N, D)
    A = weights(q, q, mask=Padding(RIGHT.repeat(2, 1)))
    assert torch.equal(real_keys(A), RIGHT.expand(2, B, N))
    assert torch.equal(real_queries(A), RIGHT.expand(2, B, N))
    flat = weights(q.flatten(0, 1), q.flatten(0, 1), mask=Padding(RIGHT.repeat(2, 1)))
    close(sinks(A).share.flatten(0, 1), sinks(flat).share)
    close(similarity(A).flatten(0, 1), similarity(flat))
    close(diagonality(A).flatten(0, 1), diagonality(flat))


def test_an_attention_over_nothing_has_no_padding():
    for i, j in ((0, 3), (3, 0), (0, 0)):
        A = weights(torch.zeros(2, 1, i, 4), torch.zeros(2, 1, j, 4), mask=Padding((0, j)))
        assert real_keys(A).shape == (2, j)
        assert real_queries(A).all()


@pytest.mark.parametrize("terms", [{}, {"normalize": Sigmoid(-1.0)}], ids=["softmax", "sigmoid"])
def test_rows_of_other_queries_are_zero(terms):
    A = make(mask=Padding(LENGTHS), **terms)
    truth = A.dense() * RIGHT[:, None, :, None]
    close(without_queries(A, RIGHT).dense(), truth)
    close(received_from(A, RIGHT), truth.sum(2))
    A.summary()  # now the row statistic is known
    close(without_queries(A, RIGHT).dense(), truth)
    close(without_queries(A.select(batch=[2, 1], heads=[3]), RIGHT[[2, 1]]).dense(), truth[[2, 1]][:, [3]])
    rows = torch.tensor([9, 3])
    some = type(A)(A.call.select(rows=rows))
    close(without_queries(some, RIGHT[:, rows]).dense(), truth[:, :, rows])
    close(received_from(A, None), A.received())


def test_numbers_of_padding_that_are_no_numbers_stay_in_its_rows():
    A = make(mask=Padding(LENGTHS))
    q = A.call.q.clone()
    q[1, :, 8] = torch.nan
    q[2, :, 3] = torch.inf
    A, clean = weights(q, A.call.k, mask=Padding(LENGTHS)), A
    assert sinks(A).share.isfinite().all()
    close(sinks(A, threshold=0.1).share, sinks(clean, threshold=0.1).share)
    close(similarity(A), similarity(clean))
    A.entropy()  # now the row statistic is known, and NaN in those rows
    close(sinks(A, threshold=0.1).share, sinks(clean, threshold=0.1).share)


TOKENS = torch.randint(3, (B, N), generator=torch.Generator().manual_seed(5))
MEASURES = {
    "share": lambda A, ids: share(A, Window(2)),
    "locality": lambda A, ids: locality(A, 3),
    "previous token": lambda A, ids: previous_token(A),
    "duplicate token": duplicate_token,
    "induction": induction,
    "diagonality": lambda A, ids: diagonality(A),
    "sinks": lambda A, ids: sinks(A, threshold=0.1).share,
    "similarity": lambda A, ids: similarity(A),
    "similarity of two": lambda A, ids: similarity(A, weights(A.call.k, A.call.q[:, ::2], mask=A.call.mask)),
}
MASKS = {"encoder": lambda keep: Padding(keep), "decoder": lambda keep: Causal() & Padding(keep)}
both_sides = pytest.mark.parametrize("keep", [RIGHT, LEFT], ids=["right", "left"])
both_masks = pytest.mark.parametrize("masked", MASKS.values(), ids=MASKS)


def alone(A, row, keep):
    """The attention of one text without its padding."""
    at = keep[row].nonzero().flatten()
    mask = Causal() if "Causal" in repr(A.call.mask) else None
    return weights(A.call.q[row : row + 1, :, at], A.call.k[row : row + 1, :, at], mask=mask), at


@both_sides
@both_masks
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_a_padded_text_has_the_numbers_it_has_alone(measure, masked, keep):
    A = make(mask=masked(keep))
    found = measure(A, TOKENS)
    for row in range(B):
        text, at = alone(A, row, keep)
        close(found[row], measure(text, TOKENS[row : row + 1, at])[0])


FLOWS = {
    "rollout": lambda stack, v, grad: rollout(stack),
    "rollout of the last but one": lambda stack, v, grad: rollout(stack, token=-min(2, stack[0].shape[-1])),
    "rollout of all": lambda stack, v, grad: rollout(stack, token=None),
    "rollout matrix": lambda stack, v, grad: rollout_matrix(stack),
    "attention flow": lambda stack, v, grad: attention_flow(stack),
    "relevance": relevance,
    "gradient x attention": lambda stack, v, grad: gradient_attention(stack[0], v[0], grad[0]),
    "norms": lambda stack, v, grad: norm_attention(stack[0], v[0], torch.linspace(-1, 1, 8 * H * 5).view(8, H * 5)),
}


@both_sides
@both_masks
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_a_padded_text_flows_as_it_does_alone(flow, masked, keep):
    stack = [make(mask=masked(keep), seed=seed) for seed in range(3)]
    v, grad = torch.randn(3, B, G, N, 5, dtype=torch.float64), torch.randn(3, B, H, N, 5, dtype=torch.float64)
    for row in range(2):  # the last text has one token
        texts = [alone(A, row, keep)[0] for A in stack]
        at = keep[row].nonzero().flatten()
        some = slice(row, row + 1)
        padded = flow([A.select(batch=[row]) for A in stack], v[:, some], grad[:, some])
        truth = flow(texts, v[:, some, :, at], grad[:, some, :, at])
        expected = torch.zeros_like(padded)
        if padded.ndim == 3 and padded.shape[1] == N:
            expected[:, at[:, None], at] = truth
        else:
            expected[..., at] = truth
        close(padded, expected)
    if flow not in (FLOWS["rollout of the last but one"],):
        assert flow(stack, v, grad).shape[0] == B


def test_tokens_count_from_the_end_of_each_text():
    stack = [make(mask=Padding(RIGHT))]
    last = torch.tensor(LENGTHS) - 1
    close(rollout(stack), rollout(stack, token=last))
    close(rollout(stack, token=torch.tensor([-2, -7, -1])), rollout(stack, token=torch.tensor([10, 0, 0])))
    with pytest.raises(ValueError, match=r"from the end of the real tokens, \[12, 7, 1\], got \[-2, -2, -2\]"):
        rollout(stack, token=-2)
    holes = RIGHT & (torch.arange(N) != 6)  # padding within a text
    close(
        rollout([make(mask=Padding(holes))], token=-1),
        rollout([make(mask=Padding(holes))], token=torch.tensor([11, 5, 0])),
    )


def test_a_text_of_padding_alone_has_a_last_token():
    stack = [make(mask=Padding((12, 0, 0)))]
    close(rollout(stack), rollout(stack, token=N - 1))
    assert rollout(stack, token=None)[1].abs().sum() == 0


def test_a_layer_that_sees_a_token_makes_it_real_for_the_stack():
    stack = [make(mask=Padding(RIGHT)), make()]
    close(rollout(stack), rollout(stack, token=N - 1))


def test_padding_does_not_count_as_edges():
    stack = [make(mask=Padding((3, 3, 3)))]
    assert attention_flow(stack, edges=9).shape == (B, N)
    with pytest.raises(ValueError, match="at most edges=8 weights above 0, got 9"):
        attention_flow(stack, edges=8)


def layer(queries, keys, causal=False):
    return RealTokens(queries, keys, causal)


class TestQueriesOfCrossAttention:
    OWN, MEMORY, ALL = RIGHT, LEFT, torch.ones_like(RIGHT)

    def found(self, name, tokens):
        return with_own_queries((name, 0), {(key, 0): real for key, real in tokens.items()}).queries

    def test_are_those_of_the_self_attention_of_their_block(self):
        memory = RIGHT[:, :5]
        tokens = {
            "encoder.layers.0.self_attn": layer(LEFT, LEFT),
            "decoder.layers.0.self_attn": layer(self.OWN, self.OWN, causal=True),
            "decoder.layers.0.encoder_attn": layer(self.ALL, memory),
        }
        assert torch.equal(self.found("decoder.layers.0.encoder_attn", tokens), self.OWN)
        assert torch.equal(self.found("decoder.layers.0.self_attn", tokens), self.OWN)
        assert torch.equal(self.found("encoder.layers.0.self_attn", tokens), LEFT)

    @pytest.mark.parametrize(
        ("own", "cross"),
        [
            ("decoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.1.EncDecAttention"),
            ("bert.encoder.layer.0.attention.self", "bert.encoder.layer.0.crossattention.self"),
            ("decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"),
        ],
    )
    @pytest.mark.parametrize("causal", [False, True])
    def test_with_as_many_keys_are_known_by_name_or_order(self, own, cross, causal):
        tokens = {own: layer(self.OWN, self.OWN, causal), cross: layer(self.MEMORY, self.MEMORY)}
        assert torch.equal(self.found(cross, tokens), self.OWN)
        assert torch.equal(self.found(own, tokens), self.OWN)

    def test_without_their_own_layer_are_all_real(self):
        tokens = {
            "encoder.layers.0.self_attn": layer(self.MEMORY, self.MEMORY),
            "decoder.layers.0.encoder_attn": layer(self.MEMORY, self.MEMORY),
            "decoder.layers.1.encoder_attn": layer(self.ALL[:, :5], self.MEMORY),
        }
        assert self.found("decoder.layers.0.encoder_attn", tokens).all()
        assert self.found("decoder.layers.1.encoder_attn", tokens).all()
        assert torch.equal(self.found("encoder.layers.0.self_attn", tokens), self.MEMORY)

    def test_in_a_decoder_without_self_attention_are_all_real(self):
        tokens = {"decoder.attention": layer(self.MEMORY, self.MEMORY)}
        assert self.found("decoder.attention", tokens).all()
        assert torch.equal(self.found("attention", {"attention": layer(self.MEMORY, self.MEMORY)}), self.MEMORY)

    def test_blocks_of_one_kind_are_not_each_others(self):
        tokens = {f"stages.0.blocks.{n}.attn": layer(x, x) for n, x in enumerate((self.OWN, self.MEMORY))}
        assert torch.equal(self.found("stages.0.blocks.1.attn", tokens), self.MEMORY)


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("encoder.layer.0.attention.self", 5, True),
        ("encoder.layer.0.attention.self", 7, False),
        ("decoder.layers.0.encoder_attn", 5, False),
        ("blocks.0.attn", 5, False),
    ],
)
def test_a_name_may_say_that_queries_are_keys(name, keys, says):
    A = weights(torch.randn(1, 2, 5, 4), torch.randn(1, 2, keys, 4), mask=Padding((4,)))
    assert says_self(name, real_tokens(A)) is says


def test_layers_that_share_a_mask_share_their_real_tokens_until_it_is_changed():
    keep = torch.tensor([[True, True, False]])
    mask, shared = Padding(keep), SharedRealTokens()
    q, k = torch.randn(2, 1, 2, 3, 4)
    first = shared.of(weights(q, k, mask=mask))
    assert shared.of(weights(k, q, mask=mask)) is first
    assert first.keys.tolist() == [[True, True, False]]
    assert shared.of(weights(q[:, :, :1], k, mask=mask)) is not first
    keep[0, 2] = True
    assert shared.of(weights(q, k, mask=mask)).are_all


def test_shared_real_tokens_hold_few_masks(monkeypatch):
    monkeypatch.setattr(module, "MAX_SHARED_MASKS", 2)
    q, k = torch.randn(2, 1, 2, 3, 4)
    shared = SharedRealTokens()
    for length in (1, 2, 3, 2, 1):
        assert int(shared.of(weights(q, k, mask=Padding((length,)))).keys.sum()) == length
        assert len(shared._known) <= 2
