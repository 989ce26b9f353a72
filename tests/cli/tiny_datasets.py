"""Tiny files of images, captions and labelled texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from regard.data import Generated, Scenes, digits

REVIEWS = ["all heart and wit", "no wit at all", "a great film", "dull and long", "great heart", "", "so dull", "wit"]
LABELS = ["good", "bad", "good", "bad", "good", "bad", "bad", "good"]


def draw(folder: Path) -> None:
    """Reviews, digits in every format, and scenes of shapes with captions."""
    both = list(zip(LABELS, REVIEWS, strict=True))
    (folder / "reviews.tsv").write_text("".join(f"{label}\t{text}\n" for label, text in both))
    (folder / "named.tsv").write_text("text\tclass\n" + "".join(f"{text}\t{label}\n" for label, text in both))
    (folder / "reviews.txt").write_text("".join(f"{text}\n" for text in REVIEWS))
    (folder / "reviews.labels").write_text("".join(f"{label}\n" for label in LABELS))
    few = digits("test")
    images, labels = few.images[:20], few.labels[:20].astype(np.uint8)
    np.savez(folder / "digits.npz", images=images, labels=labels)
    (folder / "digits.idx").write_bytes(b"\0\0\x08\x03" + np.array(images.shape, ">u4").tobytes() + images.tobytes())
    (folder / "digits.labels").write_bytes(b"\0\0\x08\x01" + np.array([20], ">u4").tobytes() + labels.tobytes())
    coloured = np.repeat(np.kron(images, np.ones((4, 4), np.uint8))[:, None], 3, axis=1)  # 20 x 3 x 32 x 32
    records = np.concatenate([labels[:, None], coloured.reshape(20, -1)], axis=1)
    (folder / "cifar").mkdir()
    (folder / "cifar" / "data_batch_1.bin").write_bytes(records.tobytes())
    (folder / "hundred.bin").write_bytes(np.concatenate([labels[:, None], records], axis=1).tobytes())
    scenes = list(Generated(Scenes(), size=8, seed=3))
    for number, scene in enumerate(scenes):
        form = folder / "forms" / scene.shapes[0].form
        for path in (folder / "scenes" / f"{number}.png", form / f"{number}.png"):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(scene.image).save(path)
    lines = [f"{number}.png\t{text}\n" for number, scene in enumerate(scenes) for text in (scene.caption, "shapes")]
    (folder / "captions.tsv").write_text("".join(lines))
