"""Tensors of torch.func transforms are read as the tensors that they wrap, with the mapped dims in front."""

import pytest
import torch

from regard.lens.interception.func_transforms import is_true_everywhere, unwrap_transforms

X = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize(
    ("transforms", "order"),
    [((0,), (0, 1, 2)), ((1,), (1, 0, 2)), ((0, 1), (0, 2, 1)), ((2, 0), (2, 0, 1)), ((-1,), (2, 0, 1))],
)
def test_mapped_dims_are_in_front_the_outermost_first(transforms, order):
    found = []

    def look(x):
        found.append(unwrap_transforms(x))
        return x

    for each in reversed(transforms):
        look = torch.vmap(look, in_dims=each)
    look(X)
    assert torch.equal(found[0], X.permute(order))


def test_dims_that_are_not_mapped_have_one():
    found = []

    def look(x, y):
        found.append((unwrap_transforms(x), unwrap_transforms(y, ndim=4)))
        return y

    torch.vmap(torch.vmap(look, in_dims=(None, 0)), in_dims=(0, None))(X, X)
    assert torch.equal(found[0][0], X[:, None])
    assert torch.equal(found[0][1], X[None, :, None, None])


def test_values_inside_gradients_are_plain_tensors():
    found = []

    def look(x):
        y = 2 * x
        found.append(unwrap_transforms(y))
        return y.sum()

    torch.vmap(torch.func.grad(look), in_dims=1)(X)
    assert torch.equal(found[0], 2 * X.transpose(0, 1))
    assert found[0].untyped_storage().nbytes() == X.nbytes  # no wrapper has a storage


@pytest.mark.parametrize("least", [0.0, 1.0])
def test_all_slices_count(least):
    found = []

    def look(x):
        found.append(is_true_everywhere(x >= least))
        return x

    torch.vmap(look)(X)
    assert found == [least == 0.0]
    assert is_true_everywhere(least <= X) == found[0]
