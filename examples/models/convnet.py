"""A small residual network on images that returns logits, so the loss is named on the command line.

    partition examples/models/convnet.py:convnet --gpus 4 --batch 8 --loss cross_entropy

Normalisation is GroupNorm: BatchNorm's statistics depend on how the batch is spread over the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

GROUPS = 8


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut; halves the image where the stride is 2."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ConvNet(nn.Module):
    """Images [batch, 3, height, width] to logits [batch, classes]."""

    def __init__(self, classes: int = 10, widths: tuple[int, ...] = (32, 64, 128)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = zip((widths[0], *widths[:-1]), widths, strict=True)
        self.stages = nn.Sequential(*(Residual(a, b, stride=1 if a == b else 2) for a, b in pairs))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages(relu(self.stem(images)))
        out: Tensor = self.head(x.mean(dim=(2, 3)))
        return out


def convnet(batch: int = 8) -> tuple[nn.Module, tuple[Tensor]]:
    """Three residual stages on 32 x 32 images: 308,234 parameters."""
    torch.manual_seed(0)
    return ConvNet(), (torch.randn(batch, 3, 32, 32),)
