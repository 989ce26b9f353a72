"""The digits of scikit-learn."""

import pytest

from regard.data import digits


def test_digits_are_split_and_bright():
    train, test = digits("train"), digits("test")
    assert (train.images.shape, test.images.shape) == ((1438, 8, 8), (359, 8, 8))
    assert int(train.images.max()) == 255
    assert set(test.labels.tolist()) == set(range(10))
    with pytest.raises(ValueError, match=r"part must be 'train' or 'test', got 'dev'"):
        digits("dev")
