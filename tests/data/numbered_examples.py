"""Examples whose content says which they are, and the numbers of those in a batch."""

import random


def examples(count, longest=9, seed=0):
    """Examples of two sequences and a number, whose content says which they are."""
    rng = random.Random(seed)
    return [
        {"a": [n] * rng.randint(1, longest), "b": [n] * rng.randint(0, longest), "label": n % 3} for n in range(count)
    ]


class Stream:
    """Examples that can only be read along."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def indices(batches):
    return [batch["index"].tolist() for batch in batches]


def flat(lists):
    return [n for one in lists for n in one]
