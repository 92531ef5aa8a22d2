"""Llama 3 in plain torch, with the loss inside forward, and factories for its published sizes.

The large ones are built on the meta device: shapes without memory, which is all that planning needs.

    partition examples/models/llama.py:llama3_8b --gpus 8
    partition examples/models/llama.py:llama3_70b --gpus 64 --batch 1 --seq 8192
    partition examples/models/llama.py:tiny_llama --gpus 2 -o out && partition verify out --ranks 2

Sizes: "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama. The defaults are what all published sizes of Llama 3 share."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int = 8
    vocab: int = 128256
    max_seq: int = 8192
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class RotaryTable(nn.Module):
    """Cosine and sine of every (position, frequency), each [max_seq, head_dim / 2].

    The table is derived, so it is a non-persistent buffer: checkpoints do not hold it. After ``to_empty`` a trainer
    refills it with ``reset_parameters``, as it does for every module that has one.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.theta = config.rope_theta
        shape = (config.max_seq, config.head_dim // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the table in place, on whatever device it is."""
        positions, half = self.cos.shape
        exponent = torch.arange(half, dtype=torch.float32, device=self.cos.device) / half
        angle = torch.outer(torch.arange(positions, dtype=torch.float32, device=self.cos.device), self.theta**-exponent)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The rows for the sequence in ``like`` [batch, seq, hidden], in its dtype."""
        seq = like.shape[1]
        return self.cos[:seq].to(like.dtype), self.sin[:seq].to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) by its angle; x is [batch, heads, seq, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.hidden, config.hidden, bias=False)
        self.wk = nn.Linear(config.hidden, kv, bias=False)
        self.wv = nn.Linear(config.hidden, kv, bias=False)
        self.wo = nn.Linear(config.hidden, config.hidden, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        return x.view(batch, seq, -1, self.head_dim).transpose(1, 2)  # [batch, heads, seq, head_dim]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self._heads(self.wq(x)), cos, sin)
        k = rotate(self._heads(self.wk(x)), cos, sin)
        v = self._heads(self.wv(x))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each normed before and added to the residual after."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Tokens and labels, both [batch, seq] int64, to the mean cross entropy in float32."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.rope = RotaryTable(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.rope(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


LLAMA3_8B = LlamaConfig(layers=32, hidden=4096, ffn=14336, heads=32)
LLAMA3_70B = LlamaConfig(layers=80, hidden=8192, ffn=28672, heads=64)
LLAMA3_405B = LlamaConfig(layers=126, hidden=16384, ffn=53248, heads=128)
TINY = LlamaConfig(layers=4, hidden=64, ffn=192, heads=4, kv_heads=2, vocab=256, max_seq=128)

Example = tuple[nn.Module, tuple[Tensor, Tensor]]


def _on_meta(config: LlamaConfig, batch: int, seq: int) -> Example:
    with torch.device("meta"):
        tokens = torch.empty(batch, seq, dtype=torch.int64)
        return Llama(config), (tokens, torch.empty_like(tokens))


def llama3_8b(batch: int = 1, seq: int = 4096) -> Example:
    """Llama 3 8B: 8,030,261,248 parameters."""
    return _on_meta(LLAMA3_8B, batch, seq)


def llama3_70b(batch: int = 1, seq: int = 4096) -> Example:
    """Llama 3 70B: 70,553,706,496 parameters."""
    return _on_meta(LLAMA3_70B, batch, seq)


def llama3_405b(batch: int = 1, seq: int = 4096) -> Example:
    """Llama 3 405B: 405,853,388,800 parameters."""
    return _on_meta(LLAMA3_405B, batch, seq)


def tiny_llama(batch: int = 2, seq: int = 32) -> Example:
    """Four small layers with real weights, to run on a laptop: 229,952 parameters."""
    torch.manual_seed(0)
    tokens = torch.randint(TINY.vocab, (batch, seq + 1))
    return Llama(TINY), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
