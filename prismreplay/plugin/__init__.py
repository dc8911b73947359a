"""The pruning plugin: kernels for NVIDIA GPUs that let one device stand for absent ranks.

`moves`, the schedules and `simulation` plan and check pruned communications, `advance_code` and
`advance_simulation` do so for operations that end when they would on the cluster, with neither torch
nor CUDA; modules that load the kernels of `cuda/` import both inside their functions.
"""
