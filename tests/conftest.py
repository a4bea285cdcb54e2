"""One thread, Triton's interpreter without a GPU, and GPU tests skipped there one by one."""

import contextlib
import os

import pytest
import torch

# Many small tensors on few cores: more threads only fight each other.
torch.set_num_threads(1)

# Triton reads this when it is first imported, by whichever test comes first.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Before TensorFlow, which some trainer's test imports: the other way round their copies of LLVM
# clash and the process dies.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401


def pytest_addoption(parser):
    parser.addoption("--default-device", help="torch.set_default_device() in every test")


@pytest.fixture(autouse=True)
def _default_device(request, monkeypatch):
    """Whatever is meant for the host must say so: here nothing else goes there."""
    device = request.config.getoption("--default-device")
    if device is not None:

        class Generator(torch.Generator):
            def __new__(cls, device=device):
                return super().__new__(cls, device)

        monkeypatch.setattr(torch, "Generator", Generator)
        torch.set_default_device(device)
    yield
    if device is not None:
        torch.set_default_device(None)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def fresh_compiler():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def jax_device(request):
    import jax

    try:
        device = jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip("no GPU that JAX can see")
    with jax.default_device(device):
        yield device
