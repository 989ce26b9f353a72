"""Pictures: found by name, read as bytes, and refused with a reason."""

import io
import struct
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from regard.data import DataError, Pictures, pixels, read_image
from regard.data import image_files as module
from tests.data.pictures import noise


def test_pictures_are_found_by_name_in_order(shop):
    root, images = shop
    pictures = Pictures(root)
    assert list(pictures) == sorted(images)
    for name, image in images.items():
        assert name in pictures
        assert np.array_equal(pictures[name], image)
    assert "cat/none.png" not in pictures
    with pytest.raises(DataError, match=r"shop.*: no image 'cat/none.png'"):
        pictures["cat/none.png"]


def test_names_do_not_leave_the_folder(tmp_path):
    Image.fromarray(noise(2, 2)).save(tmp_path / "secret.png")
    (tmp_path / "shop").mkdir()
    pictures = Pictures(tmp_path / "shop")
    assert "../secret.png" not in pictures
    assert str(tmp_path / "secret.png") not in pictures


def test_damaged_and_missing_images_are_named(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(noise(50, 50, 3)).save(buffer, "PNG")
    for data in (b"", b"text", buffer.getvalue()[:200]):
        (tmp_path / "a.png").write_bytes(data)
        with pytest.raises(DataError, match=r"a.png: not an image that can be read .*; convert it to PNG"):
            read_image(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"b.png: no such image; check the path"):
        read_image(tmp_path / "b.png")


def test_enormous_images_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    Image.new("1", (100, 100)).save(tmp_path / "a.png")
    monkeypatch.setattr(module, "MAX_PIXELS", 9_999)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("unpacked"))
    with pytest.raises(DataError, match=r"100 x 100 pixels exceed the limit of 9,999; scale it down"):
        read_image(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("mode", "dims"), [("L", 2), ("1", 2), ("LA", 2), ("RGB", 3), ("RGBA", 3), ("P", 3), ("CMYK", 3)]
)
def test_any_mode_becomes_grey_or_rgb(tmp_path, mode, dims):
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    Image.new(mode, (7, 5)).save(path)
    image = read_image(path)
    assert image.shape == (5, 7, 3)[:dims]
    assert image.dtype == np.uint8


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_grey_of_16_bits_is_scaled_to_8(tmp_path, ending):
    values = np.array([[0, 128, 129], [257, 32_768, 65_535]], np.uint16)
    Image.fromarray(values).save(tmp_path / f"a.{ending}")
    assert read_image(tmp_path / f"a.{ending}").tolist() == [[0, 0, 1], [1, 128, 255]]
    assert read_image(tmp_path / f"a.{ending}").dtype == np.uint8


def test_grey_of_16_bits_with_the_high_byte_first_is_scaled_to_8(tmp_path):
    header = b"MM\0*" + struct.pack(">I", 8)
    tags = [(256, 3), (257, 1), (258, 16), (259, 1), (262, 1), (273, 200), (278, 1), (279, 6)]
    entries = b"".join(struct.pack(">HHII", tag, 4, 1, value) for tag, value in tags)
    table = header + struct.pack(">H", len(tags)) + entries + bytes(4)
    (tmp_path / "a.tif").write_bytes(table.ljust(200, b"\0") + struct.pack(">3H", 0, 257, 65_535))
    with Image.open(tmp_path / "a.tif") as image:
        assert image.mode == "I;16B"
    assert read_image(tmp_path / "a.tif").tolist() == [[0, 1, 255]]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_without_a_range_is_refused(tmp_path, mode):
    Image.new(mode, (3, 2), 7).save(tmp_path / "a.tif")
    message = f"a.tif: pixels of mode {mode} have no fixed range from black to white; scale them to 0 to 255"
    with pytest.raises(DataError, match=message):
        read_image(tmp_path / "a.tif")


def test_photographs_stand_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").shape == (8, 4, 3)


def test_pixels_are_channels_first_between_0_and_1():
    image = noise(5, 7, 3)
    assert torch.equal(pixels(image), torch.from_numpy(image.astype(np.float32) / 255).permute(2, 0, 1))
    assert pixels(image, channels=1).shape == (1, 5, 7)
    grey = pixels(noise(5, 7))
    assert grey.shape == (3, 5, 7)
    assert torch.equal(grey[0], grey[2])
    assert pixels(noise(9, 4, 3), size=6).shape == (3, 6, 6)
    assert pixels(noise(9, 4), size=4, channels=1).shape == (1, 4, 4)
    with pytest.raises(ValueError, match=r"channels must be 1 or 3, got 4"):
        pixels(image, channels=4)


@pytest.mark.parametrize("image", [np.ones((4, 4, 3)), np.ones((4, 4, 4), np.uint8), np.ones(4, np.uint8)])
def test_pixels_are_those_of_bytes(image):
    with pytest.raises(ValueError, match=r"an image must be bytes \(height, width\[, 3\]\), got .*; use read_image"):
        pixels(image)


def test_pixels_keep_the_middle():
    image = np.zeros((4, 12), np.uint8)
    image[:, 4:8] = 255
    assert pixels(image, size=4, channels=1).min() == 1


def test_digest_is_that_of_the_content_in_a_folder_and_in_an_archive(tmp_path, monkeypatch):
    contents = {"a.png": b"x" * 300, "b.png": b"x" * 300, "c.png": b"x" * 299 + b"y"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for name in contents:
            archive.add(tmp_path / name, name)
    for limit in (2**20, 100):  # a small and a large file
        monkeypatch.setattr(module, "WHOLE_DIGEST_BYTES", limit)
        monkeypatch.setattr(module, "PART_BYTES", 20)
        found = [[Pictures(tmp_path / path).digest(name) for name in contents] for path in (".", "all.tar")]
        assert found[0] == found[1]
        a, b, c = found[0]
        assert a == b != c
