"""Frames: what is written is what a browser reads, within the error that is stated."""

import struct

import numpy as np
import pytest
import torch

from regard.views.viewer.wire_format import COARSE, FINE, coarse, error, fine, frame, linear, parse_frame, plain


def through(coded):
    return parse_frame(frame({"x": coded}))[1]["x"]


def test_plain_numbers_arrive_to_the_bit():
    x = torch.randn(3, 5)
    assert np.array_equal(through(plain(x)), x.double().numpy())
    assert np.array_equal(through(plain(torch.tensor([0, 7, 2**32 - 1]), "u4")), [0, 7, 2**32 - 1])


@pytest.mark.parametrize(("code", "steps", "least"), [(fine, FINE, 2.0**-63), (coarse, COARSE, 4.6e-7)])
def test_weights_arrive_within_the_stated_relative_error(code, steps, least):
    x = torch.cat((torch.logspace(np.log10(least), 0, 4001, dtype=torch.float64), torch.tensor([1.0, 0.5])))
    away = np.abs(through(code(x)) / x.numpy() - 1)
    assert away.max() <= error(steps) * 1.0001
    assert away.max() >= 0.9 * error(steps)  # and it is no better than it says
    assert error(FINE) < 0.0007
    assert error(COARSE) < 0.03


@pytest.mark.parametrize("code", [fine, coarse])
def test_nothing_and_everything_are_exact(code):
    assert through(code(torch.tensor([0.0, 1.0, 1e-30]))).tolist()[:2] == [0.0, 1.0]


@pytest.mark.parametrize("code", [plain, fine, coarse, linear])
def test_what_is_no_number_arrives_as_such(code):
    x = torch.tensor([0.5, torch.nan, 0.0, 1.0])
    assert np.array_equal(np.isnan(through(code(x))), [False, True, False, False])
    assert np.allclose(through(code(x))[[0, 2, 3]], [0.5, 0, 1], atol=0.01)
    assert np.isnan(through(code(torch.full((3,), torch.nan)))).all()


@pytest.mark.parametrize("code", [fine, coarse])
def test_what_is_past_the_largest_is_the_largest(code):
    assert through(code(torch.tensor([2.0, torch.inf]))).tolist() == [1.0, 1.0]


def test_differences_keep_their_sign():
    x = torch.tensor([-1.0, -0.25, 0.0, 0.25, -(2.0**-40)])
    assert np.allclose(through(fine(x)), x.numpy(), rtol=error(FINE))


def test_linear_codes_span_their_range():
    x = torch.linspace(-3, 11, 777)
    assert np.abs(through(linear(x)) - x.numpy()).max() <= 14 / 508 + 1e-5
    assert through(linear(torch.full((4,), 2.5))).tolist() == [2.5] * 4
    assert through(linear(torch.zeros(0))).shape == (0,)


def test_arrays_begin_at_multiples_of_eight_and_headers_say_the_rest():
    raw = frame({"a": coarse(torch.rand(3)), "b": plain(torch.rand(2, 2))}, state="exact", note="ü")
    (n,) = struct.unpack_from("<I", raw)
    assert (4 + n) % 8 == 0
    header, arrays = parse_frame(raw)
    assert (header["state"], header["note"]) == ("exact", "ü")
    assert header["arrays"] == [
        {"name": "a", "type": "u1", "steps": COARSE, "shape": [3]},
        {"name": "b", "type": "f4", "shape": [2, 2]},
    ]
    assert arrays["b"].shape == (2, 2)
    assert len(raw) == 4 + n + 8 + 16
