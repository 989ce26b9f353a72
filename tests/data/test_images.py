"""Labelled images: folders of classes, and the array files of MNIST, NumPy and CIFAR."""

import gzip
import io
import struct
import zipfile

import numpy as np
import pytest
from PIL import Image

from regard.data import DataError, ImageFolder, Images, Pictures, cifar10, cifar100, idx_images, npz_images
from regard.data.images import read_idx
from tests.data.pictures import noise


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
        (b"PK\x03\x04" * 9, r"not an IDX file of bytes|is compressed with zip"),
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
