"""PyTorch profiler (Kineto) traces: reading them, whatever wrote or broke them."""
