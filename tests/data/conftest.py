"""Files that several tests of the data read."""

import tarfile

import pytest
from PIL import Image

from tests.data.pictures import noise


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


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
