"""A later torch may lose private names: the scalers stay usable, and the adaptive one says why."""

import subprocess
import sys
from pathlib import Path

WITHOUT = """
import torch
del torch._C._current_graph_task_id, torch._C._storage_Use_Count
from gradlift.torch import AdaptiveGradScaler, GradScaler
model = torch.nn.Linear(8, 1)
torch.nn.init.constant_(model.weight, 0.01)  # a drawn one may overflow at 65536
torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for scaler in (GradScaler("cpu"), AdaptiveGradScaler(model, "cpu")):
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.ones(4, 8)).float().pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last_step_skipped
print(scaler.get_scale(), scaler.neutral)
"""


def test_without_a_view_of_backward_passes_one_scale_serves_and_the_reason_is_told():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "32768.0 this version of torch does not show its backward passes to Python\n"
    )
    assert "gradients stay at the global scale" in done.stderr
