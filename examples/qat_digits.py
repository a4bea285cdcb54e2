"""Quantisation-aware training in fp16: digits, from fake-quantised to a folded int8 file.

One model is trained in float32. Another is trained under fp16 autocast with the adaptive scaler,
then further with fake quantisation, folded (batch norms into convolutions, weights into int8),
exported, saved and loaded again. The table shows that nothing is lost on the way.

    python examples/qat_digits.py      # about a minute, most of it torchao's folding
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

from gradlift.torch import AdaptiveGradScaler, GradScaler

HELD_OUT = 360
BATCH = 64
EPOCHS = 8
QAT_EPOCHS = 2
LR = 0.1


class Digits(NamedTuple):
    """Images (n, 1, 8, 8) in float32 from 0 to 1, labels (n,) in int64."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def digits() -> Digits:
    raw: Any = load_digits()
    inputs = torch.tensor(raw.images / 16.0, dtype=torch.float32).unsqueeze(1)
    targets = torch.tensor(raw.target)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return Digits(inputs[train], targets[train], inputs[test], targets[test])


def network(batch_norm: bool = True) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        if batch_norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    """``model`` as a graph, for batches of any size above 1."""
    batch = torch.export.Dim("batch", min=2)
    example = torch.zeros(BATCH, 1, 8, 8)
    return torch.export.export(model, (example,), dynamic_shapes=({0: batch},))


def fake_quantised(model: nn.Module) -> torch.fx.GraphModule:
    """``model`` with the rounding of int8 in its forward pass, ready to be trained."""
    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config(is_qat=True))
    prepared = prepare_qat_pt2e(exported(model).module(), quantizer)
    for module in prepared.modules():
        if isinstance(module, FakeQuantizeBase):
            module.register_forward_pre_hook(in_float32)
    return prepared


def in_float32(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """A hook, because torch's fused fake quantisation does not take what autocast leaves."""
    return (args[0].float(),)


def train(
    model: nn.Module, data: Digits, scaler: GradScaler, epochs: int, lr: float = LR
) -> list[float]:
    """Train in fp16 where the scaler is enabled, else in float32; the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    steps = epochs * math.ceil(len(data.inputs) / BATCH)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(epochs):
        for rows in torch.randperm(len(data.inputs), generator=generator).split(BATCH):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
                outputs = model(data.inputs[rows])
            loss = nn.functional.cross_entropy(outputs.float(), data.targets[rows])
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=5.0)
            scaler.update()
            scaler.step_scheduler(scheduler)
            losses.append(loss.item())
    return losses


def folded(model: torch.fx.GraphModule) -> torch.export.ExportedProgram:
    """The trained model with int8 weights and no batch norms, saved and loaded again."""
    move_exported_model_to_eval(model)
    file = io.BytesIO()
    torch.export.save(exported(convert_pt2e(model)), file)
    file.seek(0)
    return torch.export.load(file)


def accuracy(model: Any, data: Digits) -> float:
    with torch.no_grad():
        right = model(data.test_inputs).argmax(1) == data.test_targets
    return right.float().mean().item()


def quantised(
    data: Digits, scaler_for: Callable[[nn.Module], GradScaler], batch_norm: bool = True
) -> tuple[torch.fx.GraphModule, GradScaler]:
    """A network trained in its scaler's precision, and then with fake quantisation."""
    plain = network(batch_norm)
    scaler = scaler_for(plain)
    train(plain, data, scaler, EPOCHS)
    unwatch(scaler)
    model = fake_quantised(plain)
    scaler = scaler_for(model)
    train(model, data, scaler, QAT_EPOCHS, lr=LR / 10)
    unwatch(scaler)
    return model, scaler


def unwatch(scaler: GradScaler) -> None:
    """torch.export traces every hook there is; an adaptive scaler may have one."""
    if isinstance(scaler, AdaptiveGradScaler):
        scaler.close()


def main() -> None:
    data = digits()
    torch.manual_seed(0)
    plain = network()
    train(plain, data, GradScaler("cpu", enabled=False), EPOCHS)
    print(f"float32                          {accuracy(plain.eval(), data):.3f}")

    torch.manual_seed(0)
    model, scaler = quantised(data, lambda model: AdaptiveGradScaler(model, "cpu"))
    program = folded(model)
    print(f"fake-quantised, trained in fp16  {accuracy(model, data):.3f}")
    print(f"folded to int8, saved, loaded    {accuracy(program.module(), data):.3f}")
    print(f"scale 2^{math.log2(scaler.get_scale()):g}, {scaler.skipped_steps} steps skipped")


if __name__ == "__main__":
    main()
