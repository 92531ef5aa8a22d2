"""Write the ONNX files of this folder: a tiny Llama with its weights, and the shape of Llama 3 8B without any.

    python examples/onnx/export.py

Needs ``pip install transformers onnxscript``. Nothing is downloaded; the weights of the tiny model are random.
"""

from __future__ import annotations

import logging
from pathlib import Path

import onnx_ir as ir
import torch
from onnxscript import optimizer
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent
TINY = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip
# The published configuration of Llama 3 8B: https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)  # fmt: skip


class Logits(torch.nn.Module):
    """Token ids in, logits out: what a training step differentiates."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids, use_cache=False).logits
        return logits


def export(model: torch.nn.Module, input_ids: torch.Tensor, *, fold: bool = True) -> ir.Model:
    """Export with symbolic batch and seq."""
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    exported = torch.export.export(model.eval(), (input_ids,), dynamic_shapes=({**dims},), strict=False)
    program = torch.onnx.export(
        exported, dynamo=True, input_names=["input_ids"], output_names=["logits"], verbose=False, optimize=fold
    )
    assert program is not None
    for value in (*program.model.graph.inputs, *program.model.graph.outputs):
        value.shape = ir.Shape(["batch", "seq", *value.shape[2:]])  # the exporter has numbered the symbols
    return program.model


def slim(model: ir.Model) -> ir.Model:
    """Drop stack traces and whatever else repeats what the graph says."""
    graph = model.graph
    for node in graph:
        for key in list(node.metadata_props):
            if not key.endswith(("name_scopes", "class_hierarchy")):
                del node.metadata_props[key]
        for value in node.outputs:
            value.metadata_props.clear()
            value.type = value.shape = None
    for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
        value.metadata_props.clear()
    graph.metadata_props.clear()
    return model


def write_tiny() -> None:
    torch.manual_seed(0)
    model = Logits(LlamaForCausalLM(TINY))
    ir.save(slim(export(model, torch.zeros(2, 16, dtype=torch.int64))), FOLDER / "tiny_llama.onnx")


def write_8b_shape() -> None:
    """Weights refer to a file that is not there; small tensors, such as rotary frequencies, are inside."""
    with FakeTensorMode():
        model = Logits(LlamaForCausalLM._from_config(LLAMA_8B, dtype=torch.bfloat16))
        exported = export(model, torch.zeros(2, 16, dtype=torch.int64), fold=False)  # there is no data to fold
    offset = 0
    for name, value in exported.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        if name.endswith("inv_freq"):
            width = LLAMA_8B.hidden_size // LLAMA_8B.num_attention_heads
            steps = torch.arange(0, width, 2, dtype=torch.float32) / width
            value.const_value = ir.tensor((1.0 / 500000.0**steps).numpy(), name=name)
        elif tensor.size > 1024:
            value.const_value = ir.ExternalTensor(
                "llama_8b_shape.weights", offset, tensor.nbytes, tensor.dtype, name=name, shape=tensor.shape
            )
            offset += tensor.nbytes
    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # it warns of every weight whose data is absent
    optimizer.optimize(exported)
    ir.save(slim(exported), FOLDER / "llama_8b_shape.onnx")


if __name__ == "__main__":
    write_tiny()
    write_8b_shape()
    for path in sorted(FOLDER.glob("*.onnx")):
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
