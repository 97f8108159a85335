"""The optimizer that needs norms of whole parameters, against arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conformance.trust_ratio import TrustRatio


def trained(steps: int, **options: float) -> torch.Tensor:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = TrustRatio([parameter, nn.Parameter(torch.ones(1))], **options)
    for _ in range(steps):
        parameter.grad = torch.tensor([0.0, 2.0])
        optimizer.step()
    return parameter.detach()


def test_a_step_is_as_long_as_the_parameter_says_whatever_the_gradient() -> None:
    # the parameter's norm is 5, the gradient's 2: the update is 5 / 2 of the gradient
    torch.testing.assert_close(trained(1, lr=0.1), torch.tensor([3.0, 3.5]))


def test_decay_is_a_part_of_the_update_whose_norm_counts() -> None:
    # the update is (3, 6), its norm 6.7082, and the step 0.1 * 5 / 6.7082 of it
    expected = torch.tensor([3.0, 4.0]) - 0.5 / 45**0.5 * torch.tensor([3.0, 6.0])
    torch.testing.assert_close(trained(1, lr=0.1, weight_decay=1.0), expected)


def test_half_of_a_step_is_made_again_in_the_next() -> None:
    once = trained(1, lr=0.1)
    norm = once.norm().item()
    expected = once - torch.tensor([0.0, 0.1 * (0.5 * 5.0 + norm)])
    torch.testing.assert_close(trained(2, lr=0.1, momentum=0.5), expected)


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_of_a_parameter_move_otherwise_than_the_whole(parts: int) -> None:
    whole = trained(1, lr=0.1)
    pieces = [nn.Parameter(piece.clone()) for piece in torch.tensor([3.0, 4.0]).chunk(parts)]
    for piece, gradient in zip(pieces, torch.tensor([0.5, 2.0]).chunk(parts), strict=True):
        piece.grad = gradient.clone()
    TrustRatio(pieces, lr=0.1).step()
    moved = torch.cat([piece.detach() for piece in pieces])
    assert not torch.allclose(moved, whole)
