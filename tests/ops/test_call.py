"""Bad calls are refused once, at the border, in words that name the argument, the expectation and the value."""

import math
import re

import numpy as np
import pytest
import torch

import regard
from regard import (
    Added,
    Additive,
    Alibi,
    Bilinear,
    Blocks,
    Causal,
    Chunked,
    Cosine,
    Dense,
    Diagonal,
    Dilated,
    Documents,
    Dot,
    Entmax,
    Gaussian,
    Global,
    Hard,
    Location,
    Near,
    Padding,
    Prefix,
    Relative,
    Rule,
    Sigmoid,
    SinkSoftmax,
    Softmax,
    Sparsemax,
    Tapered,
    Window,
    attend,
    weights,
)
from regard.ops.dispatch import BACKENDS

SEED = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(shape, generator=SEED) for shape in ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3)))
IDS, KEEP = torch.zeros(5, dtype=torch.long), torch.ones(5, 6, dtype=torch.bool)
POINT, INF = [torch.tensor(0)] * 4, float("inf")


def call(q=Q, k=K, v=V, **terms):
    return lambda: attend(q, k, v, **terms)


def A(**terms):
    return weights(Q, K, **terms)


def far(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def changed(name, **terms):
    tensors = {"q": Q.clone(), "k": K.clone(), "length": torch.tensor([3, 4]), "u": torch.randn(8)}
    if name == "u":
        terms["score"] = Additive(tensors["u"])
    late = weights(tensors["q"], tensors["k"], mask=Padding(tensors["length"]), **terms)
    tensors[name].add_(1)
    return late


TENSORS = [
    ("q_2d", call(q=Q[0, 0]), ValueError, r"q must have dims b h i d, got shape \(5, 8\); write q\[None, None\] for"),
    ("k_3d", call(k=K[0]), ValueError, r"k must have dims b h j d, got shape \(2, 6, 8\); write k\.unsqueeze\(1\)"),
    ("v_1d", call(v=V[0, 0, 0]), ValueError, r"v must have dims .*, got shape \(3,\); write v with four dims"),
    ("q_list", call(q=[[1.0]]), TypeError, r"q must be a tensor of dims b h i d, got list"),
    ("k_none", call(k=None), TypeError, r"k must be a tensor of dims b h j d, got NoneType"),
    ("v_array", call(v=V.numpy()), TypeError, r"v must be a tensor of dims .*, got ndarray"),
    ("q_int", call(q=Q.long()), TypeError, r"q must be float16, .* or float64, got torch.int64; write q\.float\(\)"),
    ("k_bool", call(k=K > 0), TypeError, r"k must be float16, .*, got torch.bool; write k\.float\(\)"),
    ("v_complex", call(v=V + 0j), TypeError, r"v must be float16, .*, got torch.complex64"),
    ("k_dtype", call(k=K.double()), ValueError, r"same dtype, got q torch.float32 and k torch.float64; write k\.to"),
    ("v_dtype", call(v=V.half()), ValueError, r"same dtype, got q torch.float32 and v torch.float16; write v\.to"),
    ("k_meta", call(k=far(2, 2, 6, 8)), ValueError, r"same device, got q cpu and k meta; write k\.to\("),
    ("v_meta", call(v=far(2, 2, 6, 3)), ValueError, r"same device, got q cpu and v meta; write v\.to\("),
    ("q_meta", call(q=far(2, 4, 5, 8)), ValueError, r"same device, got q meta and k cpu; write k\.to\("),
    ("k_batch", call(k=K[[0, 0, 0]]), ValueError, r"same batch dims, or dims of 1, got q \(2, .* k \(3, 2, 6, 8\), v"),
    ("v_batch", call(v=V[[0, 0, 0]]), ValueError, r"or dims of 1, got q .* v \(3, 2, 6, 3\); write k.unsqueeze\("),
    ("heads", call(k=K.repeat(1, 2, 1, 1)[:, :3]), ValueError, r"got h=4 and g=3; give k one of 1, 2, 4 heads"),
    ("no_heads", call(k=K[:, :0]), ValueError, r"q heads must be a multiple of k heads, got h=4 and g=0"),
    ("v_heads", call(v=V[:, :1]), ValueError, r"v must have as many heads as k, got 1 and g=2"),
    ("v_positions", call(v=V[:, :, :5]), ValueError, r"v must have as many positions as k, got 5 and j=6"),
    ("width", call(k=K[..., :7]), ValueError, r"same width for Dot, got d=8 and 7; project .* score=Bilinear\(w\)"),
    ("width_cosine", call(k=K[..., :7], score=Cosine()), ValueError, r"same width for Cosine, got d=8 and 7"),
    ("no_width", call(q=Q[..., :0], k=K[..., :0]), ValueError, r"must have heads and a width, got q \(2, 4, 5, 0\)"),
    ("q_no_heads", call(q=Q[:, :0]), ValueError, r"q and k must have heads and a width, got q \(2, 0, 5, 8\)"),
]
SLOTS = [
    ("mask_class", call(mask=Causal), TypeError, r"mask must be .*, got the class Causal; write mask=Causal\("),
    ("mask_bool", call(mask=KEEP), TypeError, r"mask must be a Mask term, got Tensor; write mask=Dense\(x\)"),
    ("mask_float", call(mask=KEEP * 1.0), TypeError, r"mask must .*; write bias=Added\(x\), or mask=Dense\(x\.bool"),
    ("mask_fn", call(mask=lambda *_: KEEP), TypeError, r"mask must be .*, got function; write mask=Rule\(fn\)"),
    ("mask_word", call(mask="causal"), TypeError, r"mask must be a Mask term, got str; write mask=Causal\(\)"),
    ("mask_flag", call(mask=True), TypeError, r"mask must be a Mask term, got bool; write mask=Causal\(\)"),
    ("mask_alibi", call(mask=Alibi(4)), TypeError, r"mask must be a Mask term, got Alibi; write bias=Alibi\(heads=4\)"),
    ("mask_alibi_class", call(mask=Alibi), TypeError, r"mask must .*, got the class Alibi; write bias=Alibi\(\.\.\."),
    ("bias_causal", call(bias=Causal()), TypeError, r"bias must be a Bias term, got Causal; write mask=Causal\(\)"),
    ("bias_tensor", call(bias=KEEP * 1.0), TypeError, r"bias must be a Bias .*; write bias=Added\(x\), or mask="),
    ("bias_bool", call(bias=KEEP), TypeError, r"bias must be a Bias term, got Tensor; write mask=Dense\(x\)"),
    ("score_word", call(score="dot"), TypeError, r"score must be a Score term, got str; write score=Dot\(\)"),
    (
        "score_fn",
        call(score=torch.matmul),
        TypeError,
        r"write score=Score.of\(fn\), fn\(score, b, h, i, j\)",
    ),
    (
        "bias_fn",
        call(bias=lambda b, h, i, j: i),
        TypeError,
        r"got function; write bias=Bias.of\(fn\), fn\(b, h, i, j\)",
    ),
    ("bias_rule", call(bias=Rule(lambda b, h, i, j: i > j)), TypeError, r"got Rule; write bias=Bias.of\(fn\)"),
    ("normalize", call(normalize=1), TypeError, r"normalize must be a Normalizer term, got int; write .*=Softmax\("),
    ("normalize_fn", call(normalize=torch.softmax), TypeError, r"normalize must be .*; write normalize=Softmax\(\)"),
    ("normalize_score", call(normalize=Dot()), TypeError, r"normalize must .*, got Dot; write score=Dot\(\)"),
    ("dropout_1", call(dropout=1.0), ValueError, r"dropout must be at least 0 and below 1, got 1.0"),
    ("dropout_low", call(dropout=-0.1), ValueError, r"dropout must be at least 0 and below 1, got -0.1"),
    ("dropout_nan", call(dropout=float("nan")), ValueError, r"dropout must be finite, got nan"),
    ("dropout_none", call(dropout=None), TypeError, r"dropout must be a number, got None \(NoneType\)"),
    ("offset", call(offset=1.5), TypeError, r"offset must be a whole number, .*, got 1.5; write int\(offset\)"),
    ("offset_flag", call(offset=True), TypeError, r"offset must be a whole number, .*, got True"),
    ("offset_tensor", call(offset=torch.tensor(1)), TypeError, r"offset must be .*, got tensor\(1\); write int"),
    ("offset_rows", call(offset=(1, 2, 3)), ValueError, r"or one for each of the b=2 batch rows, got shape \(3,\)"),
    ("offset_floats", call(offset=(1.0, 2.0)), TypeError, r"offset must be a whole number, got 1.0"),
    ("offset_float_rows", call(offset=torch.ones(2)), TypeError, r"offset must hold whole numbers, got torch.float32"),
    ("first", lambda: A(offset=(1, 2)).call.first_position, ValueError, r"have different offsets, \[1, 2\]"),
    ("window_heads", call(mask=Window((1, 2))), ValueError, r"number, or one for each of h=4 heads, got 2"),
    (
        "backend",
        call(backend="flash"),
        ValueError,
        r"backend must be one of sdpa, flex, triton, tiled, reference, got 'flash'",
    ),
    ("weights_backend", lambda: A(backend="flash"), ValueError, r"backend must be one of .*tiled.*, got 'flash'"),
    ("term_device", call(mask=Padding(far(2, dtype=torch.long))), ValueError, r"on the device of q, cpu, got meta"),
    ("bias_device", call(bias=Added(far(5, 6))), ValueError, r"Added\(float32\[5, 6\]\) must be on .*cpu, got meta"),
]
MASKS = [
    ("window_zero", lambda: Window((1, 0)), ValueError, r"Window width must be 1 or more, got 0"),
    ("window_float", lambda: Window(torch.ones(4)), TypeError, r"Window width must hold whole numbers"),
    ("chunks_zero", lambda: Chunked(0), ValueError, r"Chunked size must be 1 or more, got 0"),
    ("cu_seqlens", lambda: Documents.from_cu_seqlens(torch.tensor([1, 3])), ValueError, r"must begin with 0 and not"),
    (
        "cu_seqlens_down",
        lambda: Documents.from_cu_seqlens(torch.tensor([0, 3, 2])),
        ValueError,
        r"not decrease, got \[",
    ),
    ("window_none", lambda: Window(), ValueError, r"Window takes a width, or both before and after, got width=None"),
    ("window_both", lambda: Window(4, 1, 1), ValueError, r"got width=4, before=1, after=1; write Window\(4\)"),
    ("window_half", lambda: Window(before=1), ValueError, r"got width=None, before=1, after=None; write Window"),
    ("window_0", lambda: Window(0), ValueError, r"Window width must be 1 or more, got 0"),
    ("window_low", lambda: Window(-3), ValueError, r"Window width must be 1 or more, got -3"),
    ("window_2.0", lambda: Window(2.0), TypeError, r"Window width must be a whole number, got 2.0 \(float\)"),
    ("window_true", lambda: Window(True), TypeError, r"Window width must be a whole number, got True \(bool\)"),
    ("window_before", lambda: Window(before=-1, after=0), ValueError, r"Window before must be 0 or more, got -1"),
    ("dilated_width", lambda: Dilated(0, 1), ValueError, r"Dilated width must be 1 or more, got 0"),
    ("dilated_step", lambda: Dilated(2, 0), ValueError, r"Dilated step must be 1 or more, got 0"),
    ("prefix_low", lambda: Prefix(-1), ValueError, r"Prefix n must be 0 or more, got -1"),
    ("prefix_float", lambda: Prefix(torch.ones(2)), TypeError, r"Prefix n must hold whole numbers, got torch.float32"),
    ("prefix_2d", lambda: Prefix(IDS[None]), ValueError, r"Prefix n must have 0 or 1 dims, got shape \(1, 5\)"),
    ("prefix_count", call(mask=Prefix(IDS)), ValueError, r"Prefix n must broadcast to \(b=2\), got shape \(5,\)"),
    ("global_low", lambda: Global((1, -2)), ValueError, r"Global tokens must be 0 or more, got -2"),
    ("global_1.5", lambda: Global(1.5), TypeError, r"Global tokens must be a whole number, got 1.5"),
    ("global_float", lambda: Global(torch.ones(2)), TypeError, r"Global tokens must hold whole numbers, got torch.f"),
    ("global_0d", lambda: Global(torch.tensor(3)), ValueError, r"tokens must have 1 or 2 dims, got shape \(\)"),
    ("global_batch", call(mask=Global(IDS.repeat(3, 1))), ValueError, r"Global tokens .*b=2.*, got shape \(3, 5\)"),
    ("near_number", lambda: Near(3, 1), TypeError, r"Near center must be a tensor, got int"),
    ("near_radius", lambda: Near(torch.zeros(5), -1), ValueError, r"Near radius must be 0 or more, got -1"),
    ("near_radius_none", lambda: Near(torch.zeros(5), None), TypeError, r"Near radius must be a number, got None"),
    ("near_radius_inf", lambda: Near(torch.zeros(5), INF), ValueError, r"Near radius must be finite, got inf"),
    ("near_shape", call(mask=Near(torch.zeros(6), 1)), ValueError, r"Near center .*: its dim 'i' is 6; pass 1 or 5"),
    ("padding_int", lambda: Padding(3), TypeError, r"Padding must be a tensor, got int; write Padding\(torch.tensor"),
    ("padding_0d", lambda: Padding(torch.tensor(3)), ValueError, r"lengths must have 1 dims, got shape \(\)"),
    ("padding_float", lambda: Padding(torch.ones(2)), TypeError, r"Padding lengths must hold whole numbers, got torch"),
    ("padding_low", lambda: Padding((3, -1)), ValueError, r"Padding lengths must be 0 or more, got -1"),
    ("padding_keep", lambda: Padding(KEEP[0]), ValueError, r"Padding keep must have dims \(b, j\), got shape \(6,\)"),
    ("padding_long", lambda: Padding(KEEP[:2].long()), TypeError, r"keep must .*int64 of shape \(2, 6\);.*\.bool\(\)"),
    ("padding_ones", lambda: Padding(KEEP[:2] * 1.0), TypeError, r"Padding keep must .* got torch.float32.*\.bool\(\)"),
    ("padding_below", call(mask=Padding(torch.tensor([3, -2]))), ValueError, r"lengths must be from 0 .*=6, got -2"),
    ("padding_above", call(mask=Padding((7, 2))), ValueError, r"from 0 to the number of keys j=6, got 7"),
    ("padding_count", call(mask=Padding((1, 2, 3))), ValueError, r"one length per batch row, got 3 for b=2"),
    ("keep_shape", call(mask=Padding(KEEP[:2, :4])), ValueError, r"Padding keep .*b=2 j=6.*: its dim 'j' is 4"),
    ("documents_one", call(mask=Documents(IDS)), ValueError, r"needs key_ids .*, got i=5 and j=6; write Documents\("),
    ("documents_float", lambda: Documents(torch.ones(5)), TypeError, r"Documents query_ids must hold whole numbers"),
    ("documents_list", lambda: Documents([0, 1]), TypeError, r"Documents query_ids must be a tensor, got list"),
    ("documents_3d", lambda: Documents(IDS[None, None]), ValueError, r"query_ids must have 1 or 2 dims, got shape"),
    ("documents_length", call(mask=Documents(IDS, IDS)), ValueError, r"Documents key_ids .*: its dim 'j' is 5"),
    ("blocks_float", lambda: Blocks(torch.ones(2, 2), 2), TypeError, r"Blocks layout must be bool, .*got torch.float"),
    ("blocks_size", lambda: Blocks(KEEP, 0), ValueError, r"Blocks size must be 1 or more, got 0"),
    ("blocks_small", call(mask=Blocks(KEEP[:2, :3], 2)), ValueError, r"Blocks layout .*'i/size' is 2; pass 1 or 3"),
    ("dense_float", lambda: Dense(KEEP * 1.0), TypeError, r"Dense keep must be bool, True = may attend, got torch.fl"),
    ("dense_1d", lambda: Dense(KEEP[0]), ValueError, r"Dense keep must have 2 to 4 dims .*, got shape \(6,\)"),
    ("dense_5d", lambda: Dense(KEEP[None, None, None]), ValueError, r"2 to 4 dims .*, got shape \(1, 1, 1, 5, 6\)"),
    ("dense_list", lambda: Dense([[True]]), TypeError, r"Dense keep must be a tensor, got list; write torch.as_tensor"),
    ("dense_shape", call(mask=Dense(KEEP.T)), ValueError, r"Dense keep .*i=5 j=6\), got shape \(6, 5\): its dim 'i'"),
    ("nested", call(mask=Causal() & ~(Diagonal() | Dense(KEEP.T))), ValueError, r"Dense keep must broadcast"),
    ("rule_number", lambda: Rule(3), TypeError, r"Rule takes a function of \(b, h, i, j\), got int"),
    ("rule_float", call(mask=Rule(lambda b, h, i, j: i * 1.0)), TypeError, r"must return a bool tensor, got torch.f"),
    ("rule_bool", call(mask=Rule(lambda *_: True)), TypeError, r"must return a bool tensor, got bool; return a comp"),
    (
        "rule_and",
        call(mask=Rule(lambda b, h, i, j: j <= i and i < 3)),
        TypeError,
        r"write &, \| and ~ with each comparison in parentheses",
    ),
    (
        "rule_not",
        call(mask=Rule(lambda b, h, i, j: not j <= i)),
        TypeError,
        r"gets tensors, for which and, or, not and if do not work",
    ),
    ("rule_if", call(mask=Rule(lambda b, h, i, j: j if i > 2 else i)), TypeError, r"and torch\.where instead of if"),
    (
        "rule_two",
        call(mask=Rule(lambda i, j: j <= i)),
        TypeError,
        r"gets \(b, h, i, j\), .*, and takes \(i, j\); write lam",
    ),
    ("rule_wrong", call(mask=Rule(lambda b, h, i, j: i @ 3)), TypeError, r"unsupported operand type\(s\) for @"),
    ("and_number", lambda: Causal() & 3, TypeError, r"unsupported operand"),
    ("and_floats", lambda: Causal() & (KEEP * 1.0), TypeError, r"Dense keep must be bool"),
    ("factor_word", lambda: Alibi(4) * "2", TypeError, r"can't multiply sequence"),
    ("factor_int", lambda: Alibi(4) * IDS, TypeError, r"factor of a bias must be floating .*; write x.float"),
    ("factor_nan", lambda: Alibi(4) * INF, ValueError, r"the factor of a bias must be finite, got inf"),
    ("factor_heads", call(bias=Alibi(4) * torch.ones(3)), ValueError, r"factor of a bias must broadcast to \(h=4\)"),
    ("or_bias", lambda: Causal() | Alibi(4), TypeError, r"unsupported operand"),
]
OTHERS = [
    ("alibi_none", lambda: Alibi(), ValueError, r"Alibi takes .* exactly one of them, got neither"),
    ("alibi_both", lambda: Alibi(4, torch.ones(4)), ValueError, r"number of heads or a tensor of slopes"),
    ("alibi_0", lambda: Alibi(0), ValueError, r"Alibi heads must be 1 or more, got 0"),
    ("alibi_2d", lambda: Alibi(slopes=KEEP * 1.0), ValueError, r"Alibi slopes must have dims \(h,\), got shape \(5,"),
    ("alibi_heads", call(bias=Alibi(8)), ValueError, r"one slope per head, got 8 for h=4 heads"),
    ("alibi_slopes", call(bias=Alibi(slopes=torch.ones(2))), ValueError, r"one slope per head, got 2 for h=4 heads"),
    ("added_bool", lambda: Added(KEEP), TypeError, r"Added values must be floating point, got torch.bool; .*Dense"),
    ("added_1d", lambda: Added(torch.ones(6)), ValueError, r"Added values must have 2 to 4 dims .*, got shape \(6,\)"),
    ("added_shape", call(bias=Added(torch.randn(6, 5))), ValueError, r"Added values must .*, got shape \(6, 5\)"),
    ("sum_inside", call(bias=Alibi(4) + Alibi(2)), ValueError, r"one slope per head, got 2 for h=4"),
    ("t5_dims", lambda: Relative.t5(torch.ones(32)), ValueError, r"dims \(h, buckets\), got shape \(32,\)"),
    ("t5_heads", call(bias=Relative.t5(torch.ones(3, 32))), ValueError, r"table .*h=4.*, got shape \(3, 32\).*'h'"),
    ("t5_bucket", lambda: Relative.t5(torch.ones(4, 1)), ValueError, r"number of buckets must be 4 or more, got 1"),
    ("shaw_even", lambda: Relative.shaw(torch.ones(4, 8)), ValueError, r"dims \(2n \+ 1, d\) .*, got shape \(4, 8\)"),
    ("shaw_width", call(bias=Relative.shaw(torch.ones(5, 7))), ValueError, r"keys must have .* width d=8, got 7"),
    ("shaw_unbound", lambda: Relative.shaw(torch.ones(5, 8))(*POINT), TypeError, r"call bind\(q, k, offset\)"),
    ("gaussian_sigma", lambda: Gaussian(torch.zeros(5), 0.0), ValueError, r"Gaussian sigma must be above 0, got 0.0"),
    ("gaussian_word", lambda: Gaussian(torch.zeros(5), "1"), TypeError, r"Gaussian sigma must be a number, got '1'"),
    ("gaussian_inf", lambda: Gaussian(torch.zeros(5), INF), ValueError, r"Gaussian sigma must be finite, got inf"),
    ("gaussian_shape", call(bias=Gaussian(torch.zeros(6), 1.0)), ValueError, r"Gaussian center .*'i' is 6; pass 1"),
    ("bias_plus_one", lambda: Alibi(4) + 1, TypeError, r"unsupported operand"),
    ("dot_cap", lambda: Dot(cap=0.0), ValueError, r"Dot cap must be above 0, got 0.0"),
    ("dot_cap_word", lambda: Dot(cap="a"), TypeError, r"Dot cap must be a number, got 'a' \(str\)"),
    ("dot_cap_inf", lambda: Dot(cap=INF), ValueError, r"Dot cap must be finite, got inf"),
    ("dot_word", lambda: Dot("a"), TypeError, r"Dot scale must be a number, got 'a' \(str\)"),
    ("dot_inf", lambda: Dot(-INF), ValueError, r"Dot scale must be finite, got -inf"),
    ("dot_heads", call(score=Dot(torch.ones(3))), ValueError, r"Dot scale .*h=4\), got shape \(3,\).*pass 1 or 4"),
    ("cosine_0", lambda: Cosine(0.0), ValueError, r"Cosine temperature must be above 0, got 0.0"),
    ("cosine_word", lambda: Cosine("a"), TypeError, r"Cosine temperature must be a number, got 'a' \(str\)"),
    ("cosine_inf", lambda: Cosine(INF), ValueError, r"Cosine temperature must be finite, got inf"),
    ("bilinear_dims", lambda: Bilinear(torch.ones(8)), ValueError, r"dims \(d_q, d_k\) or .*, got shape \(8,\)"),
    ("bilinear", call(score=Bilinear(torch.ones(8, 7))), ValueError, r"query width to key width \(8, 8\), got \(8,"),
    ("bilinear_heads", call(score=Bilinear(torch.ones(3, 8, 8))), ValueError, r"w .*, got shape \(3, 8, 8\).*'h' is 3"),
    ("additive_dims", lambda: Additive(torch.ones(1, 4, 8)), ValueError, r"u must have dims .*got shape \(1, 4, 8\)"),
    ("additive", call(score=Additive(torch.ones(7))), ValueError, r"Additive u must have the query's width d=8, got 7"),
    ("additive_heads", call(score=Additive(torch.ones(3, 8))), ValueError, r"u .*, got shape \(3, 8\).*'h' is 3; pass"),
    ("location_dims", lambda: Location(torch.ones(8)), ValueError, r"dims \(n, d\) or \(h, n, d\), got shape \(8,\)"),
    ("location_rows", call(score=Location(torch.ones(4, 8))), ValueError, r"4 rows but there are 6 keys; give w at"),
    ("location", call(score=Location(torch.ones(6, 7))), ValueError, r"Location w must have .* width d=8, got 7"),
    ("entmax_1", lambda: Entmax(1.0), ValueError, r"Entmax alpha must be above 1 and at most 2, got 1.0; 1 is Softmax"),
    ("entmax_3", lambda: Entmax(3), ValueError, r"Entmax alpha must be above 1 and at most 2, got 3"),
    ("sink_heads", call(normalize=SinkSoftmax(torch.ones(3))), ValueError, r"SinkSoftmax sink .*'h' is 3; pass 1 or 4"),
    ("sink_inf", lambda: SinkSoftmax(INF), ValueError, r"SinkSoftmax sink must be finite, got inf"),
    ("sink_none", lambda: SinkSoftmax(None), TypeError, r"SinkSoftmax sink must be a number, got None \(NoneType\)"),
    ("sigmoid_heads", call(normalize=Sigmoid(torch.ones(3))), ValueError, r"Sigmoid bias .*'h' is 3; pass 1 or 4"),
    ("sigmoid_inf", lambda: Sigmoid(INF), ValueError, r"Sigmoid bias must be finite, got inf"),
    ("tapered", lambda: Tapered(Alibi(4), Softmax()), TypeError, r"takes a normalizer and a bias, got Alibi\("),
]
WEIGHTS = [
    ("topk_0", lambda: A().topk(0), ValueError, r"k must be from 1 to the number of keys 6, got 0"),
    ("topk_7", lambda: A().topk(7), ValueError, r"k must be from 1 to the number of keys 6, got 7"),
    ("topk_float", lambda: A().topk(2.0), TypeError, r"k must be a whole number, got 2.0 \(float\)"),
    ("pool_rows", lambda: A().pool(0, 2), ValueError, r"rows must be from 1 to the number of queries 5, got 0"),
    ("pool_cols", lambda: A().pool(2, 7), ValueError, r"cols must be from 1 to the number of keys 6, got 7"),
    ("pool_how", lambda: A().pool(2, 2, "min"), ValueError, r"how must be 'mean', 'sum' or 'max', got 'min'"),
    ("pool_float", lambda: A().pool(2.5, 2), TypeError, r"rows must be a whole number, got 2.5 \(float\)"),
    ("mass_float", lambda: A().mass(IDS * 1.0, IDS), TypeError, r"query_groups must be a tensor of whole .*float32"),
    ("mass_list", lambda: A().mass(IDS, [0] * 6), TypeError, r"key_groups must be a tensor of whole numbers, got list"),
    ("mass_shape", lambda: A().mass(IDS, IDS), ValueError, r"key_groups must have dims \(6,\) or \(2, 6\), got shape"),
    ("mass_low", lambda: A().mass(IDS - 1, IDS), ValueError, r"query_groups must be 0 or more, got -1"),
    ("dense_word", lambda: A().dense("large"), ValueError, r"a size must be .* such as '1GB', got 'large'"),
    ("dense_number", lambda: A().dense(10**9), TypeError, r"a size must be a string such as '1GB', got 1000000000"),
    ("dense_limit", lambda: A().dense("1B"), ValueError, r"dense matrix takes .* GB, more than limit='1B'; ask for"),
    ("product_1d", lambda: A() @ torch.ones(6), ValueError, r"A @ x takes a floating .* got torch.float32 \(6,\)"),
    ("product_int", lambda: A() @ V.long(), ValueError, r"A @ x takes a floating tensor .* got torch.int64"),
    ("product_keys", lambda: A() @ V[:, :, :5], ValueError, r"A @ x takes x with .*6, e; got shape \(2, 2, 5, 3\)"),
    ("product_heads", lambda: A() @ V[:, [0, 1, 0]], ValueError, r"heads 1, 2 or 4, 6, e; got shape \(2, 3, 6, 3\)"),
    ("product_batch", lambda: A() @ V[[0, 1, 0]], ValueError, r"dims b=2, .* got shape \(3, 2, 6, 3\)"),
    ("product_lead", lambda: weights(Q[None], K[None]) @ V[None, [0, 1, 0]], ValueError, r"b=1 x 2, .*shape \(1, 3, 2"),
    ("product_device", lambda: A() @ far(2, 2, 6, 3), ValueError, r"x must be on cpu, got meta; write x\.to\("),
    ("product_list", lambda: A() @ [1.0], TypeError, r"unsupported operand"),
    ("transposed", lambda: A().T @ V, ValueError, r"A\.T @ x takes x with .*5, e; got shape \(2, 2, 6, 3\)"),
    ("from_left", lambda: torch.ones(2, 4, 1, 6) @ A(), ValueError, r"takes x .*5, e; got shape \(2, 4, 6, 1\)"),
    ("left_1d", lambda: torch.ones(5) @ A(), ValueError, r"x @ A takes x with dims b h n 5, got shape \(5,\)"),
    ("index_range", lambda: A()[0, 4], IndexError, r"index out of range: dim 1 of the weights has 4 entries, got 4"),
    ("index_low", lambda: A()[..., -7], IndexError, r"index out of range: dim 3 of the weights has 6 entries, got -7"),
    ("index_many", lambda: A()[0, 0, 0, 0, 0], IndexError, r"too many indices: the weights have 4 dims, got 5"),
    ("index_dots", lambda: A()[..., 0, ...], IndexError, r"one Ellipsis, got more"),
    ("index_bool", lambda: A()[KEEP[0]], IndexError, r"a bool index of dim 0 must have shape \(2,\), got \(6,\)"),
    ("index_float", lambda: A()[0, 0, 1.5], IndexError, r"an index must be whole numbers, .*, got 1.5"),
    (
        "select",
        lambda: A().select(heads=4),
        IndexError,
        r"index out of range: heads of the weights has 4 entries, got 4",
    ),
    ("lse_sparsemax", lambda: A(normalize=Sparsemax()).lse, AttributeError, r"softmax kinds, not for Sparsemax\(\)"),
    ("lse_tapered", lambda: A(normalize=Tapered(Sigmoid(), Alibi(4))).lse, AttributeError, r"not for Sigmoid\(\)"),
    ("q_changed", lambda: changed("q").entropy(), RuntimeError, r"shape \(2, 4, 5, 8\), was changed in place after w"),
    ("k_changed", lambda: changed("k") @ V, RuntimeError, r"changed in place .*; call weights\(\.\.\.\) again"),
    ("mask_changed", lambda: changed("length")[0], RuntimeError, r"tensor of these weights, shape \(2,\), was changed"),
    ("score_changed", lambda: changed("u").topk(1), RuntimeError, r"these weights, shape \(8,\), was changed"),
    ("t_changed", lambda: changed("k").T @ Q, RuntimeError, r"changed in place after weights"),
]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [pytest.param(*row, id=name) for name, *row in TENSORS + SLOTS + MASKS + OTHERS + WEIGHTS],
)
def test_bad_call_is_refused_with_its_name_expectation_and_value(bad, error, message):
    with pytest.raises(error, match=message):
        bad()


def test_statistic_raises_after_q_changed_in_place():
    q = Q.clone()
    late = weights(q, K)
    assert late.statistic is not None
    q.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        _ = late.statistic


def test_weights_of_unchanged_tensors_do_not_raise():
    late = weights(Q.clone(), K.clone(), mask=Padding(torch.tensor([3, 4])), score=Additive(torch.randn(8)))
    assert (late @ V).shape == (2, 4, 5, 3)
    assert late.entropy().shape == (2, 4, 5)


def gradient(backend, measure=lambda q, late: late.entropy().square().sum()):
    """A query, a measure of its weights, and the gradient of the measure, ready to be differentiated again."""
    q = torch.linspace(-1, 1, 24, dtype=torch.double).view(1, 1, 3, 8).requires_grad_()
    value = measure(q, weights(q, K[:1, :1].double(), backend=backend))
    return q, value, torch.autograd.grad(value, q, create_graph=True)[0]


TWICE = [
    ("gradient", lambda value, once: once.square().sum()),
    ("penalty", lambda value, once: value + once.square().sum()),
]


@pytest.mark.parametrize("loss", [pytest.param(loss, id=name) for name, loss in TWICE])
def test_second_derivative_raises_on_tiled_when_it_is_pulled_back(loss):
    for backend in ("tiled", None):
        q, value, once = gradient(backend)
        with pytest.raises(RuntimeError, match="differentiable once; pass backend='reference'"):
            loss(value, once).backward()
        q, value, once = gradient(backend, lambda q, late: (late @ V[:1, :1].double()).square().sum())
        with pytest.raises(RuntimeError, match="differentiable once; pass backend='reference'"):
            torch.autograd.grad(loss(value, once), q)


def test_second_derivative_on_reference_is_that_of_differences():
    q, _, once = gradient("reference")
    (twice,) = torch.autograd.grad(once.square().sum(), q)
    assert twice.abs().max() > 0
    assert torch.autograd.gradgradcheck(lambda q: weights(q, K[:1, :1].double(), backend="reference").entropy(), q)


def test_first_gradient_kept_for_a_second_is_that_of_the_reference():
    torch.testing.assert_close(gradient("tiled")[2], gradient("reference")[2])


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize(("b", "i", "j"), [(0, 5, 6), (2, 0, 6), (2, 5, 0), (2, 1, 1), (1, 1, 6), (1, 6, 1)])
def test_empty_and_single_lengths_are_legal(b, i, j, backend):
    q, k, v = torch.randn(b, 4, i, 8), torch.randn(b, 2, j, 8), torch.randn(b, 2, j, 3)
    masks = [None, Causal(), Window(2), Diagonal(), Prefix(1), Global((0,)), Padding((0,) * b), ~Causal() | Diagonal()]
    masks += [Dense(torch.ones(i, j, dtype=torch.bool)), Near(torch.zeros(i), 1), Rule(lambda b, h, i, j: i >= j)]
    for mask in masks:
        out = attend(q, k, v, mask=mask, bias=Alibi(4), backend=backend)
        lazy = weights(q, k, mask=mask, bias=Alibi(4), backend=backend)
        assert out.shape == (b, 4, i, 3)
        assert lazy.dense().shape == lazy.T.dense().mT.shape == (b, 4, i, j)
        assert lazy.entropy().shape == lazy.distance().shape == lazy.lse.shape == (b, 4, i)
        assert lazy.received().shape == (b, 4, j)
        assert not out.isnan().any()
        if j == 0:
            assert not out.any()
            assert (lazy.lse == -torch.inf).all()


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_largest_weight_of_a_query_without_keys_is_zero(backend):
    assert not weights(Q, K[:, :, :0], backend=backend).max().any()


@pytest.mark.parametrize("normalize", [Softmax(), SinkSoftmax(0.0), Sigmoid(), Sparsemax(), Entmax(), Hard()], ids=repr)
def test_every_normalizer_takes_no_keys_and_one_key(normalize):
    assert not attend(Q, K[:, :, :0], V[:, :, :0], normalize=normalize).any()
    assert attend(Q, K[:, :, :1], V[:, :, :1], normalize=normalize).isfinite().all()


def test_legal_borders_are_accepted():
    assert attend(Q, K[:, :1], V[:, :1], dropout=0.999, offset=-3).shape == (2, 4, 5, 3)
    assert attend(Q, K, V[..., :0], offset=100, mask=Causal()).shape == (2, 4, 5, 0)
    assert attend(Q[None], K[None], V[None], mask=Padding((0, 6))).shape == (1, 2, 4, 5, 3)
    assert attend(Q[..., :1], K[..., :1], V, bias=Added(torch.zeros(5, 6))).shape == (2, 4, 5, 3)
    assert attend(Q, K, V, score=Location(torch.ones(9, 8)), normalize=Entmax(2)).shape == (2, 4, 5, 3)
    assert A().topk(6).values.shape == A().pool(5, 6).shape == (2, 4, 5, 6)


BROADCAST = {
    "one row of keys": ((3,), (1,), (1,)),
    "one query for all": ((1,), (3,), (3,)),
    "values alone": ((3,), (3,), (1,)),
    "two batch dims": ((4, 3), (1, 3), (4, 1)),
    "dims that keys lack": ((4, 3), (3,), (1,)),
}


@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(2), Padding((5,))], ids=str)
@pytest.mark.parametrize("leads", BROADCAST.values(), ids=BROADCAST)
def test_batch_dims_broadcast_as_pytorch_s_do(leads, mask):
    tensors = [torch.randn(*lead, 2, 6, 8, requires_grad=True) for lead in leads]
    full = torch.broadcast_shapes(*leads)
    repeated = [x.expand(*full, 2, 6, 8).contiguous() for x in tensors]
    if mask == Padding((5,)):
        mask = Padding((5,) * math.prod(full))
    out, want = attend(*tensors, mask=mask), attend(*repeated, mask=mask)
    torch.testing.assert_close(out, want)
    assert out.shape == (*full, 2, 6, 8)
    for ours, theirs in zip(*(torch.autograd.grad(x.sin().sum(), tensors) for x in (out, want)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_weights_broadcast_batch_dims_too():
    q, k = torch.randn(4, 3, 2, 5, 8), torch.randn(3, 2, 6, 8)
    A = weights(q, k, mask=Causal())
    assert A.shape == (4, 3, 2, 5, 6)
    torch.testing.assert_close(A[...], weights(q, k.expand(4, -1, -1, -1, -1), mask=Causal())[...])


def test_a_mask_of_several_batch_dims_says_how_to_flatten_it():
    x = torch.randn(2, 3, 1, 5, 8)
    with pytest.raises(TypeError, match=r"if these are lengths of several batch dims, Padding\(lengths.flatten\(\)\)"):
        Padding(torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"if these are several batch dims, write Padding\(keep.flatten\(0, -2\)\)"):
        Padding(torch.ones(2, 3, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"if there are several batch dims, write x.flatten\(0, -4\)"):
        Dense(torch.ones(2, 3, 1, 5, 5, dtype=torch.bool))
    lengths = torch.tensor([[1, 2, 3], [4, 5, 1]])
    flat = attend(*[x.flatten(0, 1)] * 3, mask=Padding(lengths.flatten()))
    torch.testing.assert_close(attend(x, x, x, mask=Padding(lengths.flatten())), flat.unflatten(0, (2, 3)))


def test_an_array_is_answered_with_its_tensor():
    with pytest.raises(TypeError, match=r"Padding must be a tensor, got ndarray; write torch.as_tensor\(x\)"):
        Padding(np.ones((2, 5), dtype=bool))


def test_the_help_of_attend_names_every_term_and_backend():
    words = set(re.findall(r"\w+", attend.__doc__))
    terms = {name for name in regard.__all__ if isinstance(getattr(regard, name), type) and name[0].isupper()}
    assert terms - words - {"Summary", "Weights", "Mask", "Normalizer"} == set()  # base classes are in the guide
    assert set(BACKENDS) <= words
