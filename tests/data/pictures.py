"""Random pictures for the tests."""

import numpy as np

RNG = np.random.default_rng(0)


def noise(*shape):
    """A picture of random bytes."""
    return RNG.integers(0, 256, shape, dtype=np.uint8)
