"""Which parallel axis a process group serves, from what the program called it.

Device meshes call their groups ``mesh_<dimension>``, Megatron-core describes them as
``DATA_PARALLEL_GROUP`` and the like. Names that tell nothing give None.
"""

from __future__ import annotations

import re

__all__ = ["axis_of"]

# What is left of a description after `mesh_`, or before `_group`, and the axis it means.
_ALIASES = {
    "data": "dp",
    "data_parallel": "dp",
    "ddp": "dp",
    "dp_replicate": "dp",
    "replicate": "dp",
    "dp_shard": "fsdp",
    "shard": "fsdp",
    "tensor": "tp",
    "tensor_parallel": "tp",
    "tensor_model_parallel": "tp",
    "model": "tp",
    "pipe": "pp",
    "pipeline": "pp",
    "pipeline_parallel": "pp",
    "pipeline_model_parallel": "pp",
    "context": "cp",
    "context_parallel": "cp",
    "expert": "ep",
    "expert_parallel": "ep",
    "expert_model_parallel": "ep",
    "expert_data_parallel": "edp",
    "expert_tensor_parallel": "etp",
    "data_parallel_group_with_cp": "dp_cp",
    "data_parallel_with_cp": "dp_cp",
}
_AXES = frozenset(_ALIASES.values()) | {"hsdp", "sp", "world"}
_WORLD = ("default_pg", "world")


def axis_of(name: str, desc: str = "") -> str | None:
    """The axis of a group: dp, fsdp, tp, pp, cp, ep, …, `world`; None when its names do not say.

    Dimensions of a mesh that are none of these keep their own name.
    """
    for text in (desc, name):
        plain = text.strip().lower()
        if plain in _WORLD:
            return "world"
        mesh = re.fullmatch(r"mesh_(\w+)", plain)
        plain = re.sub(r"^mesh_|_(group|pg)$|_\d+$", "", plain)
        axis = _ALIASES.get(plain, plain)
        if axis in _AXES or (mesh and not re.fullmatch(r"dim_?\d*|\d*|default", axis)):
            return axis
    return None
