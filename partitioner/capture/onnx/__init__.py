"""ONNX files into torch.fx graphs, by a table of operators split by family."""

from partitioner.capture.onnx.importer import import_onnx
from partitioner.capture.onnx.weights import has_weights, initializer_of, read_weights

__all__ = ["has_weights", "import_onnx", "initializer_of", "read_weights"]
