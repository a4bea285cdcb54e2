"""One thread, Triton's interpreter without a GPU, and GPU tests skipped there one by one."""

import contextlib
import gc
import os
import random
from pathlib import Path

import default_device
import numpy as np
import pytest
import torch
from global_state import global_state

# Many small tensors on few cores: more threads only fight each other.
torch.set_num_threads(1)

# Triton reads this when it is first imported, by whichever test comes first.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# JAX would take most of a GPU's memory, which the tests in other processes need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Before TensorFlow, which some trainer's test imports: the other way round their copies of LLVM
# clash and the process dies.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401


# Importing every test makes a million objects, which stay: the collector would go through them
# again and again, a second at a time. It waits until they are there, and then leaves them out.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


# More than a few seconds each: `make test-long`, which CI runs after `make test`.
LONG = set((Path(__file__).parent / "long.txt").read_text().split())

# What torch 2.6, the oldest that is declared, cannot do, by the names of tests that need it.
NOT_IN_OLDEST = {
    "test_torch_adaptive.py::test_a_distributed_checkpoint_holds": "dcp.save has no no_dist",
    "test_torch_master_weights.py::test_a_checkpoint_on_disk": "dcp.save has no no_dist",
    "test_torch_adaptive_checkpoints.py": "FSDP2 does not run on the CPU",
    "test_torch_adaptive_ranks.py": "FSDP2 does not run on the CPU",
    "test_torch_rank_cases.py": "FSDP2 does not run on the CPU",
    "test_torch_ranks.py::test_two_ranks_train_as_one": "FSDP2 does not run on the CPU",
    "test_torch_ranks.py::test_four_ranks_train_as_one": "FSDP2 does not run on the CPU",
    "test_ranks_of_a_group_follow_one_plan": "FSDP2 does not run on the CPU",
    "test_the_agreement_is_traced_whole": "torch.compile does not trace hash()",
    "[defect_6_": "torch.compile does not trace inspect.unwrap",
    "[defect_5_mixed_gradients]": "DTensor warns of random numbers on the CPU",
    "[defect_5_plain_first]": "DTensor warns of random numbers on the CPU",
    "test_4_dtensors_with_different": "DTensor warns of random numbers on the CPU",
    "test_torch_has_the_defect[defect_7_bad_argument": "torch does not have this defect yet",
    "test_one_product_for_all_leaves": "storages do not tell how many use them",
    "test_leaves_that_must_not_wait": "storages do not tell how many use them",
    "test_memory_that_somebody_else_holds": "storages do not tell how many use them",
    "test_a_pass_that_raises_leaves_no_gradient": "storages do not tell how many use them",
}


def pytest_addoption(parser):
    parser.addoption("--default-device", help="torch.set_default_device() in every test")


@pytest.fixture(autouse=True)
def _global_state():
    """Fail a test that changes what the tests after it find, whatever their order."""

    def changes():
        now = global_state()
        return {k: (before[k], now[k]) for k in before if k in now and before[k] != now[k]}

    before = global_state()
    yield
    if changes():
        gc.collect()  # hooks of a scaler in a cycle go with it
        assert not changes(), "the test leaves global state changed"


@pytest.fixture(autouse=True)
def _default_device(request, _global_state):
    """Whatever is meant for the host must say so: here nothing else goes there."""
    device = request.config.getoption("--default-device")
    if device is not None:
        default_device.use(device)
    yield
    if device is not None:
        default_device.end()


@pytest.fixture(autouse=True)
def _seed():
    """Torch draws another seed in every process: a test would be another one in every run."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.hookimpl(tryfirst=True)  # before the marks are chosen by
def pytest_collection_modifyitems(items):
    if seed := os.environ.get("GRADLIFT_TEST_ORDER"):
        random.Random(seed).shuffle(items)
    for item in items:
        test = item.nodeid.removeprefix("tests/")
        if {test, test.split("[")[0], test.split("::")[0]} & LONG:
            item.add_marker(pytest.mark.long)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        for item in items:
            for name, reason in NOT_IN_OLDEST.items():
                if name in item.nodeid:
                    item.add_marker(pytest.mark.skip(reason=f"torch 2.6: {reason}"))
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


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def jax_device(request):
    import jax

    try:
        device = jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip("no GPU that JAX can see")
    with jax.default_device(device):
        yield device


@pytest.fixture
def fresh_accelerate():
    from trainer_cases import forget_accelerate

    forget_accelerate()
    yield
    forget_accelerate()
