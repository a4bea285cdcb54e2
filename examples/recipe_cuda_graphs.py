"""A whole fp16 training step as one CUDA graph, overflows included.

    python examples/recipe_cuda_graphs.py

Nothing in the step waits for the device: the optimizer is fused, so that the decision to skip is
taken on the device, and the scale moves inside the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradlift.torch import GradScaler


def main(steps: int = 40) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True, capturable=True)
    scaler = GradScaler("cuda", init_scale=2.0**10, model=model)
    inputs = torch.randn(256, 64, device="cuda")
    targets = inputs[:, :1].tanh()
    # What changes from step to step is written into tensors that the graph reads.
    blow_up = torch.ones((), device="cuda")

    def step() -> Tensor:
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            loss = nn.functional.mse_loss(model(inputs), targets) * blow_up
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up = [step().item() for _ in range(3)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for replay in range(steps):
        blow_up.fill_(1e30 if replay == 5 else 1.0)
        graph.replay()
    print(f"loss {warm_up[0]:.4f} -> {loss.item():.4f} in {steps} replays")
    print(f"skipped {scaler.skipped_steps}, scale {scaler.get_scale():g}")


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("this recipe needs a CUDA device")
