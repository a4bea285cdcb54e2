"""Scripts as users of Apex wrote them, run unmodified but for the import.

Each is kept as text that says ``from apex import amp``. The test changes that one line, runs it,
and compares the losses it recorded with those of the same script in float32.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gradlift import apex as amp

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LEVELS = ["O0", "O1", "O2", "O3"]
MIXED = ["O1", "O2"]

CLASSIFIER = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from apex import amp


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc1 = nn.Linear(16 * 2 * 2, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.fc1(x.view(x.size(0), -1)))
        return self.fc2(x)


digits = load_digits()
data = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
target = torch.tensor(digits.target)

torch.manual_seed(0)
model = Net().to(args.device)
criterion = nn.CrossEntropyLoss().to(args.device)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)

# Amp accepts either values or strings for the optional override arguments.
model, optimizer = amp.initialize(model, optimizer,
                                  opt_level=args.opt_level,
                                  keep_batchnorm_fp32=args.keep_batchnorm_fp32,
                                  loss_scale=args.loss_scale)

losses = []
for epoch in range(6):
    model.train()
    for i in range(0, len(data) - 63, 64):
        input = data[i:i + 64].to(args.device)
        label = target[i:i + 64].to(args.device)
        output = model(input)
        loss = criterion(output, label)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())

model.eval()
with torch.no_grad():
    output = model(data.to(args.device))
    accuracy = (output.argmax(1) == target.to(args.device)).float().mean().item()
"""

GAN = """
import torch
import torch.nn as nn
import torch.optim as optim
from apex import amp

torch.manual_seed(0)
device = torch.device(args.device)
nz, ngf, ndf, batch_size = 16, 8, 8, 32

netG = nn.Sequential(
    nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
    nn.BatchNorm2d(ngf * 2),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 2, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netD = nn.Sequential(
    nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
    nn.BatchNorm2d(ndf * 2),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf * 2, 1, 2, 1, 0, bias=False),
    nn.Flatten(0),
).to(device)

criterion = nn.BCEWithLogitsLoss()
real_label, fake_label = 1.0, 0.0
optimizerD = optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=args.opt_level, num_losses=3)

dataset = torch.tanh(torch.randn(20, batch_size, 1, 8, 8))
losses = []
for i, data in enumerate(dataset):
    # (1) Update D network
    netD.zero_grad()
    label = torch.full((batch_size,), real_label, device=device)
    output = netD(data.to(device))
    errD_real = criterion(output, label)
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()
    D_x = output.mean().item()

    noise = torch.randn(batch_size, nz, 1, 1).to(device)
    fake = netG(noise)
    label.fill_(fake_label)
    output = netD(fake.detach())
    errD_fake = criterion(output, label)
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    errD = errD_real + errD_fake
    optimizerD.step()

    # (2) Update G network
    netG.zero_grad()
    label.fill_(real_label)
    output = netD(fake)
    errG = criterion(output, label)
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
    losses.append(errD.item() + errG.item())
"""

ACCUMULATION = """
import torch
import torch.nn as nn
from apex import amp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(args.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)

data = torch.randn(240, 16, 16)
truth = torch.randn(16, 1)
iters_to_accumulate = 4
losses = []
for iter, x in enumerate(data, 1):
    y = torch.tanh(x @ truth / 4).to(args.device)
    loss = nn.functional.mse_loss(model(x.to(args.device)), y)
    losses.append(loss.item())
    loss = loss / iters_to_accumulate
    if iter % iters_to_accumulate == 0:
        # Every iters_to_accumulate iterations, unscale and step
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    else:
        # Otherwise, accumulate gradients, don't unscale or step.
        with amp.scale_loss(loss, optimizer, delay_unscale=args.delay) as scaled_loss:
            scaled_loss.backward()
"""

RESUME = """
import os
import torch
import torch.nn as nn
from apex import amp

torch.manual_seed(args.seed)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
model = model.to(args.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)

start = 0
if os.path.exists(args.checkpoint):
    checkpoint = torch.load(args.checkpoint)
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
    amp.load_state_dict(checkpoint['amp'])
    start = checkpoint['iter']

generator = torch.Generator().manual_seed(1)
batches = torch.randn(20, 32, 8, generator=generator)
losses = []
for iter in range(start, args.iters):
    x = batches[iter].to(args.device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    losses.append(loss.item())

checkpoint = {
    'model': model.state_dict(),
    'optimizer': optimizer.state_dict(),
    'amp': amp.state_dict(),
    'iter': args.iters,
}
if args.save:
    torch.save(checkpoint, args.checkpoint)
"""


class Args:
    """What argparse would have made."""

    keep_batchnorm_fp32 = loss_scale = None
    max_norm, delay, seed, iters, save = 1e9, False, 0, 20, False
    checkpoint = "no such file"

    def __init__(self, **given):
        self.__dict__.update(given)


def run(script: str, **given: object) -> dict:
    """The script's global names after it ran."""
    line = "from apex import amp\n"
    assert script.count(line) == 1
    names: dict = {"args": Args(**given)}
    exec(script.replace(line, "from gradlift import apex as amp\n"), names)
    return names


@pytest.fixture(autouse=True)
def amp_off_afterwards():
    yield
    amp.initialize(nn.Linear(1, 1), enabled=False)


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("level", "more"),
    [
        ("O0", {}),
        ("O1", {}),
        ("O1", {"loss_scale": "128.0"}),
        ("O2", {}),
        ("O2", {"keep_batchnorm_fp32": "False", "loss_scale": "dynamic"}),
        ("O3", {}),
        ("O3", {"keep_batchnorm_fp32": "True", "loss_scale": "128.0"}),
    ],
)
def test_classifier(device, level, more):
    reference = float32_classifier(device)
    names = run(CLASSIFIER, device=device, opt_level=level, **more)
    assert names["losses"][0] == pytest.approx(reference["losses"][0], rel=2e-3)
    last, expected = mean(names["losses"][-28:]), mean(reference["losses"][-28:])
    assert expected < 0.2 < reference["losses"][0]
    assert last == pytest.approx(expected, rel=0.08)
    assert names["accuracy"] == pytest.approx(reference["accuracy"], abs=0.02)


_references = {}


def float32_classifier(device):
    if device not in _references:
        plain = CLASSIFIER.replace(
            "with amp.scale_loss(loss, optimizer) as scaled_loss:\n            scaled_loss.",
            "loss.",
        )
        names = {"args": Args(device=device, opt_level="O0")}
        plain = plain[: plain.index("# Amp accepts")] + plain[plain.index("losses = []") :]
        exec(plain.replace("from apex import amp", ""), names)
        _references[device] = {key: names[key] for key in ("losses", "accuracy")}
    return _references[device]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", MIXED)
def test_gan_with_two_models_two_optimizers_and_three_losses(device, level):
    reference = run(GAN, device=device, opt_level="O0")["losses"]
    names = run(GAN, device=device, opt_level=level)
    assert names["losses"] == pytest.approx(reference, rel=1e-2)
    assert abs(reference[-1] - reference[0]) > 0.05
    state = amp.state_dict()
    assert list(state) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
    assert [s["unskipped"] for s in state.values()] == [20, 20, 20]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_accumulation(device, level, delay):
    more = {"opt_level": level, "device": device, "delay": delay}
    reference = run(ACCUMULATION, device=device, opt_level="O0")["losses"]
    losses = run(ACCUMULATION, **more)["losses"]
    assert mean(losses[:20]) == pytest.approx(mean(reference[:20]), rel=0.02)
    assert mean(losses[-20:]) == pytest.approx(mean(reference[-20:]), rel=0.1)
    assert mean(reference[-20:]) < 0.8 * mean(reference[:20])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", MIXED)
def test_clipping_through_master_params(device, level):
    def train(level, max_norm):
        return run(ACCUMULATION, device=device, opt_level=level, max_norm=max_norm, delay=True)[
            "losses"
        ]

    reference = train("O0", 0.05)
    assert train(level, 0.05) == pytest.approx(reference, rel=0.02, abs=0.01)
    assert mean(train(level, 1e9)[-20:]) != pytest.approx(mean(reference[-20:]), rel=0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS)
def test_save_and_resume_goes_on_bit_for_bit(device, level, tmp_path):
    common = {"device": device, "opt_level": level, "checkpoint": str(tmp_path / "amp.pt")}
    whole = run(RESUME, **common)["losses"]
    first = run(RESUME, **common, iters=10, save=True)["losses"]
    resumed = run(RESUME, **common, seed=123)["losses"]
    assert first + resumed == whole
    assert whole[-1] < 0.8 * whole[0]


@pytest.mark.parametrize("device", DEVICES)
def test_resume_from_a_checkpoint_that_apex_wrote(device, tmp_path):
    names = run(RESUME, device=device, opt_level="O2", iters=5)
    checkpoint = names["checkpoint"]
    # Apex's own: weights as float32 copies of float16, and the scaler's two numbers.
    checkpoint["model"] = {
        key: value.half().float() if value.is_floating_point() else value
        for key, value in checkpoint["model"].items()
    }
    checkpoint["amp"] = {"loss_scaler0": {"loss_scale": 2.0**12, "unskipped": 1995}}
    path = str(tmp_path / "apex.pt")
    torch.save(checkpoint, path)
    losses = run(RESUME, device=device, opt_level="O2", checkpoint=path, seed=5)["losses"]
    whole = run(RESUME, device=device, opt_level="O2")["losses"]
    run(RESUME, device=device, opt_level="O2", checkpoint=path, iters=11)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**13, "unskipped": 1}
    assert losses == pytest.approx(whole[5:], rel=1e-2)


def test_the_page_runs_as_printed(capsys):
    page = (Path(__file__).parent.parent / "docs" / "apex.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, "<docs/apex.md>", "exec"), names)
    assert len(blocks) == 3
    assert names["state"]["loss_scaler0"].keys() == {"loss_scale", "unskipped"}
    assert "O1" in capsys.readouterr().out
    amp.initialize(nn.Linear(1, 1), enabled=False)
