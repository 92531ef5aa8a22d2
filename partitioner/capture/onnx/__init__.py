"""ONNX files into torch.fx graphs, by a table of operators split by family."""
