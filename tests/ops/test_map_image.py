"""Small pictures of maps: the PNG holds the maps, each to its own largest value, and nothing of the alt text runs."""

import base64
import io
import re

import numpy as np
import torch
from PIL import Image

from regard import Alibi, Causal, Padding, weights
from regard.ops.map_image import DARK, GAP_COLOUR, GAP_PIXELS, LIGHT, image_of_maps


def pixels_of(tag):
    raw = base64.b64decode(re.search(r'src="data:image/png;base64,([^"]+)"', tag)[1])
    return np.asarray(Image.open(io.BytesIO(raw)))


def test_a_map_is_drawn_by_the_square_root_of_its_share_of_the_largest():
    maps = torch.tensor([[[[0.0, 1.0], [0.25, torch.nan]], [[0.0, 0.0], [0.0, 0.0]]]])
    pixels = pixels_of(image_of_maps(maps, cell_pixels=4, alt="two maps"))
    assert pixels.shape == (2, 4 + GAP_PIXELS, 3)
    assert [tuple(pixels[0, 0]), tuple(pixels[0, 1])] == [LIGHT, DARK]
    assert tuple(pixels[1, 0]) == tuple(np.round((np.add(LIGHT, DARK)) / 2).astype(int))
    assert tuple(pixels[1, 1]) == LIGHT
    assert tuple(pixels[0, 2]) == GAP_COLOUR
    assert (pixels[:, 2 + GAP_PIXELS :] == 255).all()


def test_the_words_of_an_image_are_escaped():
    assert "<script" not in image_of_maps(torch.ones(1, 1, 1, 1), cell_pixels=1, alt='"><script>')


def test_a_mask_shows_its_pattern():
    pixels = pixels_of(Causal()._repr_html_())
    assert ((pixels == DARK).all(-1) == np.tril(np.ones((12, 12), bool))).all()
    assert "<pre>Causal()</pre>" in Causal()._repr_html_()
    assert pixels_of((Causal() & Padding(torch.tensor([3, 5])))._repr_html_()).ndim == 3
    assert pixels_of((~Causal())._repr_html_()).shape == (12, 12, 3)


def test_weights_show_their_heads():
    torch.manual_seed(0)
    A = weights(*torch.randn(2, 1, 3, 20, 8, requires_grad=True), bias=Alibi(3))
    shown = A._repr_html_()
    pixels = pixels_of(shown)
    assert pixels.shape == (20, 3 * 20 + 2 * GAP_PIXELS, 3)
    darkest = (pixels[:, :20].astype(int).sum(-1)).argmin()
    assert darkest == A.dense()[0, 0].argmax()
    assert "heads 0 to 2 of the first text" in shown
    assert "Weights(1 x 3 x 20 x 20" in shown
    long = weights(*torch.randn(2, 1, 1, 5000, 8))
    assert "<img" not in long._repr_html_()
    assert "<img" not in weights(torch.randn(1, 1, 0, 8), torch.randn(1, 1, 4, 8))._repr_html_()
