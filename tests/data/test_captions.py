"""Captions: gathered by image, from tab-separated lines and from JSON, and refused with their place."""

import json

import numpy as np
import pytest

from regard.data import DataError, captions_json, captions_tsv


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


def test_image_that_is_not_there_names_the_column_of_names(shop, tmp_path):
    (tmp_path / "split.tsv").write_text("train\t1.png\ta cat\n")
    with pytest.raises(
        DataError, match=r"line 1: no image 'train' in .*; column 0 was read as its name; name=1 \(--im"
    ):
        captions_tsv(tmp_path / "split.tsv", shop[0])
