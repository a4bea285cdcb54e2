"""Pipelines of ``torch.distributed.pipelining``: a loss that is no loss.

Before its first step a schedule calls the loss function once on memory that nobody wrote, to learn
the shapes of gradients. What such a loss is says nothing about the training, and no step follows.
torch does not tell a rehearsal from a step, so it is looked for among the callers.
"""

from __future__ import annotations

import sys
from types import CodeType

import torch


def is_rehearsal() -> bool:
    """Whether a pipeline stage calls just to learn shapes."""
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None or torch.compiler.is_compiling():
        return False
    method = getattr(stages.PipelineStage, "_backward_metadata_inference", None)
    code = getattr(method, "__code__", None)
    return code is not None and _is_running(code)


def _is_running(code: CodeType) -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
