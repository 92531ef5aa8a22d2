"""GPT-2 small in plain torch: learned positions, LayerNorm, and an output head tied to the token embedding.

    partition examples/models/gpt2.py:gpt2_small --gpus 8

The tied weight is one storage under two names, so it is counted, sharded and gathered once, in a unit that holds both
modules. Dropout is left out: a sharded run could not repeat the random numbers of the unsharded one.

Sizes: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True)
class Gpt2Config:
    """Shape of a GPT-2."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 50257
    positions: int = 1024


class Attention(nn.Module):
    """Causal self-attention; one projection makes queries, keys and values."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )  # [batch, heads, seq, head_dim]
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two projections around a tanh-approximated GELU."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each normed before and added to the residual after."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Gpt2(nn.Module):
    """Tokens and labels, both [batch, seq] int64, to the mean cross entropy in float32."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.hidden)
        self.wpe = nn.Embedding(config.positions, config.hidden)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)  # torch's own N(0, 1) would make the logits of a tied head enormous

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


SMALL = Gpt2Config(layers=12, hidden=768, heads=12)
TINY = Gpt2Config(layers=2, hidden=64, heads=4, vocab=250, positions=64)

Example = tuple[nn.Module, tuple[Tensor, Tensor]]


def _example(config: Gpt2Config, batch: int, seq: int) -> Example:
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab, (batch, seq + 1))
    return Gpt2(config), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def gpt2_small(batch: int = 1, seq: int = 1024) -> Example:
    """GPT-2 small with real (random) weights: 124,439,808 parameters, the tied one counted once."""
    return _example(SMALL, batch, seq)


def tiny_gpt2(batch: int = 2, seq: int = 32) -> Example:
    """Two small blocks and the same tied head; 250 tokens, so that the shards of the table come out uneven."""
    return _example(TINY, batch, seq)
