"""Pictures, labelled images and captions: read as they are, and refused with a reason."""

import gzip
import io
import json
import struct
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from regard.data import (
    DataError,
    ImageFolder,
    Images,
    Pictures,
    captions_json,
    captions_tsv,
    cifar10,
    cifar100,
    digits,
    idx_images,
    npz_images,
    pixels,
    read_image,
)
from regard.data import image_files as module
from regard.data.images import read_idx

RNG = np.random.default_rng(0)


def noise(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(params=["folder", "tar"])
def shop(request, tmp_path):
    """Three pictures in two classes, and a file that is none, as a folder and as an archive."""
    images = {"cat/a.png": noise(5, 7, 3), "cat/b.png": noise(4, 4), "dog/sub/c.png": noise(9, 3, 3)}
    root = tmp_path / "shop"
    for name, image in images.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / name)
    (root / "notes.txt").write_text("not a picture")
    if request.param == "tar":
        with tarfile.open(tmp_path / "shop.tar", "w") as archive:
            archive.add(root, arcname="./")
        root = tmp_path / "shop.tar"
    return root, images


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


def test_folders_are_classes(shop):
    root, images = shop
    found = ImageFolder(root)
    assert found.classes == ("cat", "dog")
    assert [label for _, label in found] == found.labels.tolist() == [0, 0, 1]
    assert np.array_equal(found[2].image, images["dog/sub/c.png"])
    assert found.where(2).endswith("dog/sub/c.png")
    assert ImageFolder(root, classes=("ape", "cat", "dog")).labels.tolist() == [1, 1, 2]
    with pytest.raises(DataError, match=r"unknown class 'cat'; expected ape, dog"):
        ImageFolder(root, classes=("ape", "dog"))


def test_folders_without_classes_or_images_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no such folder or archive"):
        ImageFolder(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"holds no images; expected a folder for each class with images inside"):
        ImageFolder(tmp_path)
    Image.fromarray(noise(2, 2)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"the image 'a.png' is in no class; move it into the folder of its class"):
        ImageFolder(tmp_path)
    (tmp_path / "a.tar").write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match=r"a.tar: not a tar archive .*; expected a folder or a .tar"):
        Pictures(tmp_path / "a.tar")


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


def idx(array, kind=8):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_files_are_read(tmp_path, pack):
    images, labels = noise(6, 5, 4), np.array([0, 1, 2, 2, 1, 0], np.uint8)
    (tmp_path / "i").write_bytes(pack(idx(images)))
    (tmp_path / "l").write_bytes(pack(idx(labels)))
    found = idx_images(tmp_path / "i", tmp_path / "l", classes=("a", "b", "c"))
    assert len(found) == len(list(found)) == 6
    assert np.array_equal(found.images, images)
    assert np.array_equal(found[4].image, images[4])
    assert found[3].label == 2
    with pytest.raises(DataError, match=r"expected images of 3 dims and labels of 1, got 1 and 3; is .*i the labels"):
        idx_images(tmp_path / "l", tmp_path / "i")
    with pytest.raises(DataError, match=r"labels must lie in 0 to 1, got 0 to 2"):
        idx_images(tmp_path / "i", tmp_path / "l", classes=("a", "b"))
    (tmp_path / "l").write_bytes(pack(idx(labels[:5])))
    with pytest.raises(DataError, match=r"expected one label for each of 6 images, got \(5,\)"):
        idx_images(tmp_path / "i", tmp_path / "l")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"not an IDX file of bytes, it begins with b''"),
        (b"\x00\x00", r"not an IDX file"),
        (b"PK\x03\x04" * 9, r"not an IDX file of bytes"),
        (idx(np.zeros(3, ">f4"), kind=0x0D), r"not an IDX file of bytes"),
        (idx(noise(3, 3, 3))[:-1], r"the header says 3 x 3 x 3 bytes, the file has 26; download it again"),
        (idx(noise(3)) + b"\0", r"the header says 3 bytes, the file has more"),
        (
            b"\0\0\x08\x03\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
            r"the header says 4294967295 x .*, the file has 0",
        ),
        (b"\0\0\x08\x03\0\0", r"the header is truncated; download it again"),
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_files_that_lie_are_refused(tmp_path, data, message, pack):
    (tmp_path / "i").write_bytes(pack(data))
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "i")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files_are_read(tmp_path, save):
    images, labels = noise(6, 5, 4, 1), np.array([[0], [1], [2], [2], [1], [0]])
    save(tmp_path / "a.npz", x_train=images, y_train=labels, coloured=np.asfortranarray(noise(6, 5, 4, 3)))
    found = npz_images(tmp_path / "a.npz", images="x_train", labels="y_train")
    assert np.array_equal(found.images, images[..., 0])
    assert found.labels.tolist() == [0, 1, 2, 2, 1, 0]
    assert npz_images(tmp_path / "a.npz", images="coloured", labels="y_train")[0].image.shape == (5, 4, 3)
    with pytest.raises(DataError, match=r"a.npz: no array 'images'; it has x_train, y_train, coloured"):
        npz_images(tmp_path / "a.npz")


class Canary:
    """An object whose unpickling would leave a trace."""

    def __reduce__(self):
        return open, ("pickled", "w")


def test_pickled_arrays_are_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", images=np.array([Canary()], dtype=object), labels=np.zeros(1, int))
    with pytest.raises(DataError, match=r"the array 'images' holds object, expected whole numbers"):
        npz_images("a.npz")
    np.array([Canary()], dtype=object).dump("data_batch_1")
    with pytest.raises(DataError, match=r"this looks like the Python version; download the binary version"):
        cifar10("data_batch_1")
    assert not (tmp_path / "pickled").exists()


def npy(shape, data, dtype="|u1"):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue() + data


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (
            npy((10**9, 10**3, 10**3), b"12"),
            r"the array 'images' holds 2 bytes, but its header says 1,000,000,000,000,000; write",
        ),
        (npy((1, 2, 2), b"123"), r"the array 'images' holds 3 bytes, but its header says 4; write"),
        (npy((1, 1, 1), b"12345678", "<f8"), r"the array 'images' holds float64, expected whole numbers"),
        (b"nonsense", r"the array 'images' cannot be read"),
        (b"", r"the array 'images' cannot be read"),
        (npy((2, 2, 2), b"12345678"), r"expected one label for each of 2 images"),
        (npy((1, 2), b"12"), r"images must be uint8 of dims \(count, height, width\)"),
    ],
)
def test_npz_files_that_lie_are_refused(tmp_path, member, message):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", member)
        archive.writestr("labels.npy", npy((1,), b"\0"))
    with pytest.raises(DataError, match=message):
        npz_images(tmp_path / "a.npz")


def test_npz_files_too_large_or_none_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.npz").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"a.npz: not an .npz file .*; write it with numpy.savez"):
        npz_images(tmp_path / "a.npz")
    monkeypatch.setattr("regard.data.images.MAX_ARRAY_BYTES", 100)
    np.savez(tmp_path / "a.npz", images=noise(9, 9, 9), labels=np.zeros(9, int))
    with pytest.raises(DataError, match=r"the array 'images' takes 857 bytes, more than the limit of .*; split it"):
        npz_images(tmp_path / "a.npz")


@pytest.mark.parametrize(("read", "before", "count"), [(cifar10, 1, 10), (cifar100, 2, 100)])
def test_cifar_records_are_read(tmp_path, read, before, count):
    images, labels = noise(3, 32, 32, 3), np.array([count - 1, 0, 5], np.uint8)
    coarse = np.full((3, before - 1), 7, np.uint8)
    rows = np.concatenate([coarse, labels[:, None], images.transpose(0, 3, 1, 2).reshape(3, -1)], axis=1)
    (tmp_path / "1.bin").write_bytes(rows[:2].tobytes())
    (tmp_path / "2.bin").write_bytes(rows[2:].tobytes())
    found = read(tmp_path / "1.bin", tmp_path / "2.bin")
    assert np.array_equal(found.images, images)
    assert found.labels.tolist() == labels.tolist()
    assert len(found.classes) == count
    (tmp_path / "2.bin").write_bytes(rows.tobytes()[:-1])
    with pytest.raises(DataError, match=r"2.bin: expected records of \d+ bytes, got .*; it may be truncated; download"):
        read(tmp_path / "1.bin", tmp_path / "2.bin")
    rows[1, before - 1] = count
    (tmp_path / "1.bin").write_bytes(rows.tobytes())
    with pytest.raises(DataError, match=rf"1.bin: record 1 has the label {count}, expected 0 to {count - 1}"):
        read(tmp_path / "1.bin")
    with pytest.raises(ValueError, match=r"expected the files to read, got none"):
        read()


def test_images_that_cannot_be_say_why():
    for images in (np.zeros((2, 3, 3)), noise(2, 3), noise(2, 3, 3, 4)):
        with pytest.raises(ValueError, match=r"images must be uint8 of dims"):
            Images(images, [0, 1])
    with pytest.raises(ValueError, match=r"expected at least one image, got none"):
        Images(noise(0, 3, 3), [])


def test_digits_are_split_and_bright():
    train, test = digits("train"), digits("test")
    assert (train.images.shape, test.images.shape) == ((1438, 8, 8), (359, 8, 8))
    assert int(train.images.max()) == 255
    assert set(test.labels.tolist()) == set(range(10))
    with pytest.raises(ValueError, match=r"part must be 'train' or 'test', got 'dev'"):
        digits("dev")


def test_captions_of_an_image_are_gathered(shop, tmp_path):
    root, images = shop
    lines = ["train\tcat\ta.png\tone", "train\tcat\tb.png\ttwo", "train\tcat\ta.png\tthree", "dev\tdog\tnone.png\tx"]
    (tmp_path / "c.tsv").write_text("\n".join(lines))
    found = captions_tsv(tmp_path / "c.tsv", root, name=(1, 2), caption=3, where={0: "train"})
    assert [(name, captions) for _, captions, name in found] == [
        ("cat/a.png", ("one", "three")),
        ("cat/b.png", ("two",)),
    ]
    assert np.array_equal(found[0].image, images["cat/a.png"])
    assert [one.captions for one in found.each()] == [("one",), ("three",), ("two",)]
    assert list(found.texts()) == ["one", "three", "two"]
    assert found.each().where(1).endswith("cat/a.png")
    with pytest.raises(DataError, match=r"c.tsv line 4: no image 'dog/none.png' in .*shop"):
        captions_tsv(tmp_path / "c.tsv", root, name=(1, 2), caption=3)
    with pytest.raises(DataError, match=r"c.tsv line 1: expected at least 6 columns, got 4"):
        captions_tsv(tmp_path / "c.tsv", root, name=(1, 2), caption=5)
    with pytest.raises(DataError, match=r"c.tsv: holds no captions"):
        captions_tsv(tmp_path / "c.tsv", root, where={0: "test"})


def test_empty_captions_are_named(shop, tmp_path):
    (tmp_path / "c.tsv").write_text("cat/a.png\tone\ncat/a.png\t \n")
    with pytest.raises(DataError, match=r"c.tsv line 2: the caption of 'cat/a.png' is empty; write a caption"):
        captions_tsv(tmp_path / "c.tsv", shop[0])


def test_captions_in_json_as_a_list_or_as_coco_has_them(shop, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps([{"image": "cat/a.png", "caption": ["one", "two"]}, {"image": "cat/b.png", "caption": "x"}])
    )
    found = captions_json(path, shop[0])
    assert [one.captions for one in found] == [("one", "two"), ("x",)]
    coco = {
        "images": [{"id": 7, "file_name": "cat/a.png"}, {"id": 8, "file_name": "cat/b.png"}],
        "annotations": [{"image_id": 8, "caption": "x"}, {"image_id": 7, "caption": "one"}],
    }
    path.write_text(json.dumps(coco))
    assert [(one.name, one.captions) for one in captions_json(path, shop[0])] == [
        ("cat/b.png", ("x",)),
        ("cat/a.png", ("one",)),
    ]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (3, r"\[0\]: expected an object with image and caption"),
        ([{"image": "cat/a.png"}], r"\[0\]: expected the text of a name and of a caption"),
        ([{"image": 3, "caption": "x"}], r"\[0\]: expected the text of a name"),
        ([{"image": "no.png", "caption": "x"}], r"\[0\]: no image 'no.png' in"),
        ([{"image": "cat/a.png", "caption": [" "]}], r"\[0\]: the caption of 'cat/a.png' is empty"),
        ([{"image": "cat/a.png", "caption": "\ud800"}], r"\[0\]: a caption must be Unicode, got the lone surrogate"),
        ([], r"holds no captions"),
        ({}, r"expected the lists 'images' and 'annotations'"),
        (
            {"images": [], "annotations": [{"image_id": 1}]},
            r"annotations\[0\]: expected an object with the id of an im",
        ),
        (
            {"images": [{"id": 1}], "annotations": [{"image_id": 1, "caption": "x"}]},
            r"annotations\[0\]: expected the text",
        ),
        (
            {"images": [{"id": []}], "annotations": [{"image_id": {}, "caption": "x"}]},
            r"expected an object with the id",
        ),
    ],
)
def test_bad_captions_in_json_are_named(shop, tmp_path, tree, message):
    (tmp_path / "c.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"c.json: .*" + message):
        captions_json(tmp_path / "c.json", shop[0])
