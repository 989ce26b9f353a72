"""Pictures: images of any usual layout as bytes, on the axes they are the patches of."""

import numpy as np
import pytest
import torch
from PIL import Image

from regard import weights
from regard.lens import Tape
from regard.lens.tape.image_patches import PatchedImage, patched_images


@pytest.mark.parametrize(
    "image",
    [
        torch.rand(3, 8, 6),
        torch.rand(8, 6, 3),
        torch.rand(1, 8, 6),
        torch.rand(8, 6),
        np.random.default_rng(0).random((8, 6, 3)),
        (torch.rand(8, 6, 3) * 255).to(torch.uint8),
    ],
    ids=["c y x", "y x c", "grey", "y x", "array", "bytes"],
)
def test_images_of_any_layout_become_bytes(image):
    (picture,) = patched_images(image, (4, 3), 1)
    assert picture.pixels.shape == (8, 6, 3)
    assert picture.pixels.dtype == torch.uint8
    assert picture.tokens == 13


def test_bytes_stay_what_they_are_and_normalized_images_are_brought_back():
    raw = (torch.rand(5, 5, 3) * 255).to(torch.uint8)
    assert torch.equal(patched_images(raw, (1, 1), 0)[0].pixels, raw)
    x = torch.tensor([[-2.0, 0.0], [1.0, 2.0]])
    assert patched_images(x, (1, 1), 0)[0].pixels[..., 0].tolist() == [[0, 128], [191, 255]]


@pytest.mark.parametrize("shape", [(2, 8, 6), (8,), (0, 3, 3)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="an image must have dims y x, y x c or c y x"):
        patched_images(torch.rand(*shape), (2, 2), 1)


def test_a_batch_has_a_picture_each():
    given = patched_images(torch.rand(4, 3, 8, 6), (4, 3), 1)
    assert len(given) == 4
    assert len(patched_images([torch.rand(8, 6), torch.rand(3, 8, 6)], (4, 3), 1)) == 2
    with pytest.raises(ValueError, match="pixels must be uint8 y x 3"):
        PatchedImage(torch.rand(4, 4, 3), 1, 1, 0)
    with pytest.raises(ValueError, match="rows must be"):
        PatchedImage(torch.zeros(4, 4, 3, dtype=torch.uint8), 0, 1, 0)


def test_pictures_are_on_the_axes_of_as_many_tokens():
    q, k = torch.randn(2, 2, 1, 13, 8)
    tape = Tape({("vit", 0): weights(q, k), ("cross", 0): weights(q[:, :, :5], k), ("text", 0): weights(q, k)})
    tape.picture(torch.rand(2, 3, 8, 6), patches=(4, 3), layers="*t")
    tape.picture(torch.rand(3, 8, 6), patches=(4, 3), layers="cross")
    first, second = tape.pictures_of("vit", batch=0), tape.pictures_of("vit", batch=1)
    assert first[0] is first[1]
    assert first[0] is not second[0]
    assert tape.pictures_of("cross")[0] is None
    assert tape.pictures_of("cross", batch=1)[1] is tape.pictures_of("cross")[1]
    with pytest.warns(
        UserWarning, match="a picture of 82 tokens .* but 'text' has 13 queries and 13 keys; check patches"
    ):
        tape.picture(torch.rand(3, 8, 6), patches=(9, 9), layers="text")
    assert tape.pictures_of("text") == (None, None)


def test_numbers_of_patches_and_pictures_may_come_from_other_libraries(tmp_path):
    tape = Tape({("vit", 0): weights(*torch.randn(2, 1, 1, 5, 8))})
    tape.facts["patches"] = np.int64(2)
    tape.picture(Image.new("RGB", (6, 8)), patches=(np.int64(2), np.int64(2)), special=np.int64(1))
    tape.save(tmp_path / "tape.safetensors")
    again = Tape.load(tmp_path / "tape.safetensors")
    assert again.pictures_of("vit")[0].tokens == 5
    assert again.facts["patches"] == "2"


def test_pictures_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"patches must be \(rows, columns\), e.g. \(14, 14\), got 2"):
        patched_images(torch.rand(8, 6), 2, 1)
    with pytest.raises(ValueError, match="NaN or Inf among its pixels"):
        patched_images(torch.full((8, 6), torch.nan), (2, 2), 1)
