"""Pipelines of ``torch.distributed.pipelining``: a loss that is no loss.

Before its first step a schedule runs the stage and the loss function once on memory that nobody
wrote, forward and backward, to learn the shapes of outputs and gradients. What they hold then says
nothing about the training, and no step follows.
torch does not tell a rehearsal from a step, so it is looked for among the callers.
"""

from __future__ import annotations

import sys

import torch

STAGES = "torch.distributed.pipelining.stage"
"""Without this module loaded there are no pipelines, and nothing to ask for."""
_REHEARSALS = ("_forward_metadata_inference", "_backward_metadata_inference")


def is_rehearsal() -> bool:
    """Whether a pipeline stage calls just to learn shapes."""
    stages = sys.modules.get(STAGES)
    if stages is None or torch.compiler.is_compiling():
        return False
    methods = [getattr(stages.PipelineStage, name, None) for name in _REHEARSALS]
    codes = {code for method in methods if (code := getattr(method, "__code__", None)) is not None}
    frame = sys._getframe() if codes else None
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None
