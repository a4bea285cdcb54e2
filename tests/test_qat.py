"""Quantisation-aware training in fp16 with gradlift's scaler: trained, folded, exported, loaded.

The functions are those of examples/qat_digits.py. torchao takes half a minute to fold a batch
norm, whatever the model, so the default run has none.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from gradlift.torch import AdaptiveGradScaler, GradScaler


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parent.parent / "examples" / "qat_digits.py"
    spec = importlib.util.spec_from_file_location("qat_digits", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def float32_accuracy(example, data, batch_norm, seed):
    torch.manual_seed(seed)
    model = example.network(batch_norm)
    example.train(model, data, GradScaler("cpu", enabled=False), example.EPOCHS)
    return example.accuracy(model.eval(), data)


def int8_accuracy(example, data, scaler_for, batch_norm, seed):
    torch.manual_seed(seed)
    model, scaler = example.quantised(data, scaler_for, batch_norm)
    program = example.folded(model)
    assert len(int8_weights(program)) == 3
    return example.accuracy(program.module(), data), scaler, program


def adaptive(model):
    return AdaptiveGradScaler(model, "cpu")


def dynamic_from_far_too_high(model):
    return GradScaler("cpu", model=model, init_scale=2.0**28)


def int8_weights(program):
    return [v for v in program.state_dict.values() if v.dtype is torch.int8]


def test_the_loaded_int8_model_is_as_good_as_the_float32_one(example):
    data = example.digits()
    gaps = []
    for seed in (0, 1):
        int8, scaler, _ = int8_accuracy(example, data, adaptive, False, seed)
        assert int8 > 0.95
        assert scaler.skipped_steps == 0
        assert scaler.plan is not None
        assert scaler.neutral is None  # the fake-quantised graph was planned and run as planned
        gaps.append(float32_accuracy(example, data, False, seed) - int8)
    assert sum(gaps) / len(gaps) < 0.015  # 360 held-out digits: one standard error is 0.008


def test_training_recovers_from_a_scale_that_overflows(example):
    data = example.digits()
    with pytest.warns(RuntimeWarning, match="a lower scale helps"):  # more than three in a row
        int8, scaler, _ = int8_accuracy(example, data, dynamic_from_far_too_high, False, 0)
    assert scaler.skipped_steps > 5
    assert scaler.get_scale() < 2.0**24
    assert int8 > 0.95


def test_gradients_through_fake_quantisation_are_the_float32_ones(example):
    torch.manual_seed(0)
    model = example.fake_quantised(example.network(False))
    data = example.digits()
    inputs, targets = data.inputs[:64], data.targets[:64]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def grads(half):
        optimizer.zero_grad()
        scaler = GradScaler("cpu", init_scale=2.0**12)
        with torch.autocast("cpu", torch.float16, enabled=half):
            outputs = model(inputs)
        loss = torch.nn.functional.cross_entropy(outputs.float(), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    grads(False)  # the observers see their first batch
    expected, got = grads(False), grads(True)
    assert torch.cosine_similarity(got, expected, dim=0) > 0.999
    assert got.norm() == pytest.approx(expected.norm().item(), rel=0.02)


@pytest.mark.slow
def test_batch_norms_fold_into_the_exported_model(example):
    data = example.digits()
    int8, _, program = int8_accuracy(example, data, adaptive, True, 0)
    targets = {str(node.target) for node in program.graph.nodes}
    assert not any("batch_norm" in target for target in targets)
    assert float32_accuracy(example, data, True, 0) - int8 < 0.015
