"""One thread, Triton's interpreter without a GPU, and GPU tests skipped there one by one."""

import os

import pytest
import torch

# Many small tensors on few cores: more threads only fight each other.
torch.set_num_threads(1)

# Triton reads this when it is first imported, by whichever test comes first.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
