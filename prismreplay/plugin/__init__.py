"""The pruning plugin: kernels for NVIDIA GPUs that let one device stand for absent ranks.

`moves` to `simulation` plan and check, with neither torch nor CUDA; the other modules load the
kernels of `cuda/` and import both inside their functions.
"""
