"""A decoder of four blocks with everything that sharding can trip over, and the plan that the tests emit for it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name

VOCAB, WIDTH, INNER = 11, 9, 15  # nothing divides by two


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mask", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x * self.mask.to(x.dtype))))))


class TinyLM(nn.Module):
    """Tied embedding and head, a parameter of the root's own, a frozen bias, dropout, buffers that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers[1].up.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.layers:
            x = block(x)
        return self.head(x)


def tiny_lm(batch: int = 2, seq: int = 5) -> tuple[nn.Module, tuple[torch.Tensor]]:
    return TinyLM(), (torch.arange(batch * seq).reshape(batch, seq) % VOCAB,)


def meta_lm(batch: int = 2, seq: int = 5) -> tuple[nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):
        return TinyLM(), (torch.empty(batch, seq, dtype=torch.int64),)
