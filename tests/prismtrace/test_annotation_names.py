from __future__ import annotations

import pytest

from prismtrace.annotation_names import Annotation, read_annotation
from prismtrace.schema import Phase


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("step 3", Annotation(step=3)),
        ("ProfilerStep#12", Annotation(step=12)),
        ("micro_batch=2", Annotation(microbatch=2)),
        ("forward", Annotation(phase=Phase.FORWARD)),
        ("offload", Annotation(copies=True)),
        ("Offload activations of layer 3", Annotation(copies=True)),
        ("reload, backward", Annotation(phase=Phase.BACKWARD, copies=True)),
        ("H2D", Annotation(copies=True)),
        ("memcpy_dtoh", Annotation(copies=True)),
        ("reloading the data set", Annotation()),
        ("the offload", Annotation()),
        ("attention", Annotation()),
    ],
)
def test_what_a_name_says(name, said):
    assert read_annotation(name) == said
