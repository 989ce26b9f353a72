"""Argument checks: what passes, and the words in which the rest is refused."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from regard import checks

INF, NAN = float("inf"), float("nan")
FLAGS = torch.ones(2, 3, dtype=torch.bool)

PASSING = [
    lambda: checks.check_int("n", 0),
    lambda: checks.check_int("n", np.int64(3), least=3),
    lambda: checks.check_int("n", 2**63 - 1),
    lambda: checks.check_within("k", 5, 5, "keys"),
    lambda: checks.check_number("x", -1e300),
    lambda: checks.check_number("x", np.float32(0.5), above=0),
    lambda: checks.check_probability("p", 0),
    lambda: checks.check_letters("biased", "", "qkvo"),
    lambda: checks.check_letters("biased", "qv", "qkvo"),
    lambda: checks.check_tensor("x", nn.Parameter(torch.zeros(1))),
    lambda: checks.check_bool_mask("keep", FLAGS),
    lambda: checks.check_integer_tensor("ids", torch.zeros(2, dtype=torch.uint8), 0, 1),
    lambda: checks.check_broadcast("x", torch.zeros(1, 7), {"b": 2, "i": None}),
    lambda: checks.check_broadcast("x", torch.zeros(()), {"b": 2}),
    lambda: checks.check_choice("how", "mean", Literal["mean", "sum"]),
    lambda: checks.check_flag("causal", False),
    lambda: checks.check_keys({"source": 1, "target": 2, "more": 3}, "source", "target"),
    lambda: checks.check_token_rows("source", torch.zeros(2, 0)),
    lambda: checks.check_token_id("bos", 9, 10),
    lambda: checks.check_token_ids("source", torch.tensor([0, 9]), 10),
    lambda: checks.check_token_ids("source", torch.zeros(0), 10),
    lambda: checks.check_token_ids("source", torch.empty(2, device="meta"), 10),
    lambda: checks.check_eps(0.0),
    lambda: checks.check_tied_vocabularies("all", 5, 5),
    lambda: checks.check_tied_vocabularies("output", 5, 6),
    lambda: checks.check_submodel("encoder", nn.Linear(1, 1), "Encoder", "Seq2Seq"),
]

REFUSED = [
    (lambda: checks.check_int("n", True), TypeError, "n must be a whole number, got True (bool)"),
    (lambda: checks.check_int("n", 1.0), TypeError, "n must be a whole number, got 1.0 (float)"),
    (lambda: checks.check_int("n", 1, least=2), ValueError, "n must be 2 or more, got 1"),
    (lambda: checks.check_int("n", 2**63), ValueError, "n must be below 2^63, got 2^63 or more"),
    (lambda: checks.check_int("n", 300, below=2**8), ValueError, "n must be below 2^8, got 2^8 or more"),
    (lambda: checks.check_within("k", 0, 5, "keys"), ValueError, "k must be from 1 to the number of keys 5, got 0"),
    (lambda: checks.check_within("k", 6, 5, "keys"), ValueError, "k must be from 1 to the number of keys 5, got 6"),
    (lambda: checks.check_number("x", False), TypeError, "x must be a number, got False (bool)"),
    (lambda: checks.check_number("x", "1"), TypeError, "x must be a number, got '1' (str)"),
    (lambda: checks.check_number("x", NAN), ValueError, "x must be finite, got nan"),
    (lambda: checks.check_number("x", -INF), ValueError, "x must be finite, got -inf"),
    (lambda: checks.check_number("x", 10**400), ValueError, "x must be finite, got inf"),
    (lambda: checks.check_number("x", 0, above=0), ValueError, "x must be above 0, got 0"),
    (lambda: checks.check_probability("p", 1), ValueError, "p must be at least 0 and below 1, got 1"),
    (
        lambda: checks.check_letters("biased", "qz", "qkvo"),
        ValueError,
        "biased must contain only letters of 'qkvo', got 'qz'",
    ),
    (
        lambda: checks.check_letters("biased", 3, "qkvo"),
        ValueError,
        "biased must contain only letters of 'qkvo', got 3",
    ),
    (lambda: checks.check_letters("biased", "vq", "qkvo"), ValueError, "in the order of 'qkvo', got 'vq'; write 'qv'"),
    (lambda: checks.check_letters("biased", "qq", "qkvo"), ValueError, "got 'qq'; write 'q'"),
    (lambda: checks.check_tensor("x", [1]), TypeError, "x must be a tensor, got list; write torch.as_tensor(...)"),
    (
        lambda: checks.check_bool_mask("keep", FLAGS * 1.0),
        TypeError,
        "keep must be bool, True = may attend, got torch.float32",
    ),
    (
        lambda: checks.check_bool_mask("keep", FLAGS[0]),
        ValueError,
        "keep must have 2 to 4 dims (b h i j, aligned right), got shape (3,)",
    ),
    (
        lambda: checks.check_integer_tensor("ids", FLAGS, 2),
        TypeError,
        "ids must hold whole numbers, got torch.bool; write x.long()",
    ),
    (
        lambda: checks.check_integer_tensor("ids", FLAGS * 1j, 2),
        TypeError,
        "ids must hold whole numbers, got torch.complex64",
    ),
    (
        lambda: checks.check_integer_tensor("ids", FLAGS.long(), 0, 1),
        ValueError,
        "ids must have 0 or 1 dims, got shape (2, 3)",
    ),
    (
        lambda: checks.check_broadcast("x", torch.zeros(3, 1), {"b": 2, "i": None}),
        ValueError,
        "x must broadcast to (b=2 i), got shape (3, 1): its dim 'b' is 3; pass 1 or 2 there",
    ),
    (
        lambda: checks.check_broadcast("x", torch.zeros(1, 2), {"b": 2}),
        ValueError,
        "x must have at most 1 dims (b=2), got shape (1, 2)",
    ),
    (
        lambda: checks.check_choice("how", "min", Literal["mean", "sum"]),
        ValueError,
        "how must be one of 'mean', 'sum', got 'min'",
    ),
    (lambda: checks.check_flag("causal", 1), TypeError, "causal must be True or False, got 1"),
    (
        lambda: checks.check_keys([1], "source"),
        TypeError,
        "a batch must be a mapping from names to tensors, got list; pass {'source': ...}",
    ),
    (
        lambda: checks.check_keys({"x": 1}, "source", "x"),
        ValueError,
        "the batch must hold 'source', 'x', got 'x'; add 'source'",
    ),
    (lambda: checks.check_keys({}, "source"), ValueError, "the batch must hold 'source', got nothing; add 'source'"),
    (
        lambda: checks.check_token_rows("source", torch.zeros(3)),
        ValueError,
        "source must have dims b n, got shape (3,); write source[None]",
    ),
    (lambda: checks.check_token_rows("source", torch.zeros(1, 2, 3)), ValueError, "write source.view(b, n)"),
    (lambda: checks.check_token_id("bos", 10, 10), ValueError, "bos must be a token of the vocabulary of 10, got 10"),
    (lambda: checks.check_token_id("bos", -1, 10), ValueError, "bos must be 0 or more, got -1"),
    (
        lambda: checks.check_token_ids("ids", torch.tensor([3, 12]), 10),
        ValueError,
        "ids must be within the vocabulary of 10, got 12",
    ),
    (
        lambda: checks.check_token_ids("ids", torch.tensor([-2, 12]), 10),
        ValueError,
        "ids must be within the vocabulary of 10, got -2",
    ),
    (lambda: checks.check_eps(-1e-6), ValueError, "eps must be 0 or more, got -1e-06"),
    (
        lambda: checks.check_tied_vocabularies("all", 5, 6),
        ValueError,
        "needs one vocabulary for both sides, got source_vocabulary=5 and target_vocabulary=6; pass tied='output'",
    ),
    (
        lambda: checks.check_submodel("encoder", 3, "Encoder", "Seq2Seq"),
        TypeError,
        "encoder must be a Encoder, got int; write Seq2Seq(Encoder(config), ...)",
    ),
]


@pytest.mark.parametrize("check", PASSING)
def test_legal_values_pass(check):
    assert check() is None


@pytest.mark.parametrize(("check", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_refusal_names_the_argument_what_is_expected_and_the_value(check, error, message):
    with pytest.raises(error, match=re.escape(message)):
        check()


def test_every_check_passes_something_and_refuses_something():
    names = {name for name in vars(checks) if name.startswith("check_")}
    for table in (PASSING, [check for check, *_ in REFUSED]):
        assert {check.__code__.co_names[1] for check in table} == names


def test_an_unknown_name_is_answered_with_the_nearest_or_with_a_list():
    assert checks.suggest_name("stpes", ["epochs", "steps"]) == "did you mean 'steps'?"
    assert checks.suggest_name("xyzzy", ("steps", "epochs")) == "known: 'steps', 'epochs'"
    assert checks.suggest_name("xyzzy", (f"n{n}" for n in range(30))).endswith(", 'n18', 'n19' and 10 more")
    assert checks.suggest_name("xyzzy", []) == "known: none"
