"""Imports mosaicml-streaming next to a CPU build of torch.

`import streaming` imports torchvision, whose wheel registers shape functions for operators that exist only in the CUDA build.
Declaring the operators first lets the import pass; nothing of torchvision is used here.
"""

from __future__ import annotations

from typing import Any

DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def import_streaming() -> Any:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for signature in DECLARED:
        library.define(signature)
    import streaming

    return streaming
