import math

import torch

from capi.method.losses import huber, prototype_use, soft_cross_entropy, squared_error, target_entropy


def test__equals_torch_cross_entropy_with_soft_targets() -> None:
    logits, targets = torch.randn(3, 4, 9), torch.softmax(torch.randn(3, 4, 9), -1)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1) / 0.12, targets.flatten(0, 1))
    torch.testing.assert_close(soft_cross_entropy(logits, targets, temperature=0.12), expected)


def test__low_precision_logits_are_lifted_to_float32() -> None:
    logits, targets = torch.randn(3, 4, 9).bfloat16(), torch.softmax(torch.randn(3, 4, 9), -1)
    loss = soft_cross_entropy(logits, targets, temperature=0.12)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, soft_cross_entropy(logits.float(), targets, temperature=0.12))


def test__entropy_of_certain_and_uniform_targets() -> None:
    assert target_entropy(torch.eye(4)[None]) == 0
    torch.testing.assert_close(target_entropy(torch.full((2, 3, 8), 1 / 8)), torch.tensor(math.log(8)))


def test__prototype_use_counts_equally_used_prototypes() -> None:
    for used in (1, 3, 8):
        mean = torch.zeros(8)
        mean[:used] = 2.5
        torch.testing.assert_close(prototype_use(mean), torch.tensor(used / 8))
    uneven = torch.tensor([0.7, 0.2, 0.1, 0.0])
    expected = math.exp(-sum(share * math.log(share) for share in (0.7, 0.2, 0.1))) / 4
    torch.testing.assert_close(prototype_use(uneven), torch.tensor(expected))


def test__losses_to_values_by_hand_and_in_float32() -> None:
    outputs, targets = 2 * torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    errors = [float(error) for error in (outputs - targets).flatten()]
    by_hand = sum(error**2 / 2 if abs(error) < 1 else abs(error) - 0.5 for error in errors) / len(errors)
    torch.testing.assert_close(huber(outputs, targets), torch.tensor(by_hand))
    torch.testing.assert_close(squared_error(outputs, targets), torch.tensor(sum(e**2 for e in errors) / len(errors)))
    for loss in (huber, squared_error):
        assert loss(outputs.bfloat16(), targets).dtype == torch.float32
