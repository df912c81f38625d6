import torch

from capi.method.feature_targets import FeatureTargets


def test__targets_are_teacher_tokens_normalized_over_channels() -> None:
    tokens, index = 3 * torch.randn(2, 6, 8) + 1, torch.tensor([[0, 5], [2, 3]])
    loss, (targets,) = FeatureTargets()([tokens], [index])
    assert loss == 0
    for image in range(2):
        for number, patch in enumerate(index[image]):
            row = tokens[image, patch]
            expected = (row - row.mean()) / (row.var(correction=0) + 1e-5).sqrt()
            torch.testing.assert_close(targets[image, number], expected, rtol=1e-4, atol=1e-5)


def test__the_loss_is_huber_s() -> None:
    outputs, targets = 2 * torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    error = (outputs - targets).abs()
    expected = torch.where(error < 1, error**2 / 2, error - 0.5).mean()
    torch.testing.assert_close(FeatureTargets().student_loss(outputs, targets), expected)
    torch.testing.assert_close(expected, torch.nn.functional.smooth_l1_loss(outputs, targets))


def test__it_remembers_nothing() -> None:
    target = FeatureTargets()
    assert not target.state_dict()
    assert target.reads_teacher
