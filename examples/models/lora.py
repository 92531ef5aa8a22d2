"""Fine-tuning with LoRA: a frozen Llama with small trainable adapters beside its query and value projections.

    partition examples/models/lora.py:tiny_lora --gpus 2

Frozen parameters are sharded and gathered like the others, but have no gradients and no optimizer state.

Method: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685).
"""

from __future__ import annotations

import torch
from llama import LLAMA3_8B, TINY, Llama, LlamaConfig
from torch import Tensor, nn


class LoraLinear(nn.Module):
    """base(x) + (alpha / rank) * b(a(x)), with ``base`` frozen and ``b`` zero at the start."""

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        device = base.weight.device
        self.a = nn.Linear(base.in_features, rank, bias=False, device=device)
        self.b = nn.Linear(rank, base.out_features, bias=False, device=device)
        nn.init.zeros_(self.b.weight)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * self.b(self.a(x))
        return out


def lora_llama(config: LlamaConfig, *, rank: int, alpha: float = 16.0) -> Llama:
    """A Llama whose only trainable parameters are adapters on ``wq`` and ``wv`` of every layer."""
    model = Llama(config).requires_grad_(False)
    for layer in model.layers:
        attention = layer.attention
        attention.wq = LoraLinear(attention.wq, rank=rank, alpha=alpha)
        attention.wv = LoraLinear(attention.wv, rank=rank, alpha=alpha)
    return model


Example = tuple[nn.Module, tuple[Tensor, Tensor]]


def llama3_8b_lora(batch: int = 1, seq: int = 4096) -> Example:
    """Llama 3 8B on the meta device with adapters of rank 16: 6,815,744 trainable parameters."""
    with torch.device("meta"):
        tokens = torch.empty(batch, seq, dtype=torch.int64)
        return lora_llama(LLAMA3_8B, rank=16), (tokens, torch.empty_like(tokens))


def tiny_lora(batch: int = 2, seq: int = 32) -> Example:
    """The tiny Llama with real weights and adapters of rank 4: 3,584 trainable parameters."""
    torch.manual_seed(0)
    tokens = torch.randint(TINY.vocab, (batch, seq + 1))
    return lora_llama(TINY, rank=4), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
