"""PyTorch execution traces: what was called, with which tensors and groups; no times."""
