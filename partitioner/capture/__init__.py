"""Doors in: nn.Module factories, torch.export programs and ONNX files become a Program."""
