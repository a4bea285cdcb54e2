"""Measures the error of FP16 gradients by loss-scale policy, on one float32 run per network.

The networks and recipes are in ``precision_networks.py``. Each run is recorded once
(``recorded.py``). At the common weights and batches the recording stores the error of the FP16
gradients at every exponent, and the largest exponent that does not overflow. Policies are then
replayed over the recording: torch's scaler with growth intervals of 2000 and 100 and with a first
scale of 2^8, constants from 2^9 to 2^24, and the policies of gradlift.

    cost    mean over steps of the error of the parameter gradients; a skipped step counts 1
    floor   error of an FP16 forward pass with a float32 backward pass; no scale is better
    bf16    error of bfloat16 without a scale
    room    median of limit - exponent, in powers of two

Costs are printed for all blocks of rows, then for the query and key rows of attention alone.
``--arms`` also runs the scaler objects themselves, on copies of the model in lock-step. Their
errors come from every step, those of replayed policies from the measured steps: compare a scaler
object with ``GradScaler``, not with "torch 2000".

    PYTHONPATH=. python3 benchmarks/precision.py --recordings FOLDER  about an hour on one CPU core
    PYTHONPATH=. python3 benchmarks/precision.py --quick              two minutes on one CPU core
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.command import Command, add_line, at_least, begin, check_target, tell
from benchmarks.precision_networks import NETWORKS, SLOW_NETWORKS, choose
from benchmarks.recorded import (
    STATISTICS,
    Constant,
    FromPolicy,
    Network,
    Policy,
    Recording,
    Result,
    ScalerArm,
    Torch,
    mean_statistics,
    record,
    replay,
    run_arms,
)
from gradlift import policy as policies
from gradlift.torch import AdaptiveGradScaler

CONSTANTS = range(9, 25)
QUICK_NETWORKS = ("vit", "convnext", "resnet", "policy-gradient", "tanh-30")
QUICK_STEPS, QUICK_SEEDS = 60, 1
BASELINES = ("torch 2000", "torch from 2^8")
"""The second has the first scale of gradlift's policies, so that only the rule differs."""
NEEDED_EXPONENTS = (12, 16)
"""Exponents that may be too low for a network."""
NEEDED_RATIO, NEEDED_DIFFERENCE = 1.5, 0.01
SMALLEST_DIFFERENCE = 1e-4
"""Differences of cost below this are not reported."""
DRAWS = 10_000
"""Of the bootstrap."""

# Two-sided 95% quantiles of Student's t by the number of values.
_QUANTILES = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def list_policies() -> dict[str, Callable[[], Policy]]:
    """Return functions that make each policy in its first state, by name."""
    made: dict[str, Callable[[], Policy]] = {
        "torch 2000": lambda: Torch(2000),
        "torch 100": lambda: Torch(100),
        "torch from 2^8": lambda: Torch(2000, init_scale=2.0**8),
    }
    # Older versions of gradlift do not have it.
    if (predictive := getattr(policies, "Predictive", None)) is not None:
        made["predictive"] = lambda: FromPolicy(predictive())
    return made


def list_arms() -> list[ScalerArm]:
    """Return the scaler objects that ``--arms`` runs."""

    def adaptive(layerwise: bool) -> Callable[[nn.Module, str], Any]:
        return lambda model, device: AdaptiveGradScaler(model, device, layerwise=layerwise)

    return [
        ScalerArm("GradScaler", lambda model, device: torch.amp.GradScaler(device)),
        ScalerArm("AdaptiveGradScaler", adaptive(True)),
        ScalerArm("layerwise=False", adaptive(False)),
    ]


# Results.

Results = dict[str, list[dict[str, Result]]]
"""By network: for each seed, the result of every policy."""


@dataclass(frozen=True)
class Measured:
    """Everything of one run of the command."""

    recordings: dict[str, list[Recording]]
    results: Results

    def costs(self, network: str, policy: str, part: str = "all") -> list[float]:
        """Return the cost of a policy for each seed."""
        return [result[policy].cost[part] for result in self.results[network]]

    def best_constant(self, network: str, part: str = "all") -> int:
        """Return the constant exponent with the lowest mean cost over seeds."""
        mean = {e: statistics.fmean(self.costs(network, constant_name(e), part)) for e in CONSTANTS}
        return min(mean, key=lambda exponent: mean[exponent])


def constant_name(exponent: int) -> str:
    """Return the name of a constant policy."""
    return f"2^{exponent}"


def replay_all(recording: Recording) -> dict[str, Result]:
    """Return the results of all policies and constants on one recording."""
    made = {name: replay(recording, make()) for name, make in list_policies().items()}
    constants = {constant_name(e): replay(recording, Constant(e)) for e in CONSTANTS}
    return {**made, **constants}


def path_of(
    folder: Path, network: str, seed: int, steps: int, every: int, device: torch.device
) -> Path:
    """Return the path of a recording."""
    where = "" if device.type == "cpu" else f"-{device.type}"
    return folder / f"{network}-seed{seed}-steps{steps}-every{every}{where}.npz"


def get_recording(
    network: Network, seed: int, arguments: argparse.Namespace, steps: int
) -> Recording:
    """Return the recording of a network and seed, from its file if there is one."""
    folder: Path | None = arguments.recordings
    path = None
    if folder is not None:
        path = path_of(folder, network.name, seed, steps, arguments.every, arguments.device)
        if path.exists():
            return Recording.load(path)
    begun = time.monotonic()

    def report(step: int, loss: float) -> None:
        if step and step % 100 == 0:
            seconds = time.monotonic() - begun
            tell(f"{network.name}, seed {seed}: step {step}, loss {loss:.4g}, {seconds:.0f} s")

    recording = record(network, seed, steps, arguments.every, arguments.device, report)
    if path is not None:
        recording.save(path)
    losses = f"loss {recording.loss[:5].mean():.4g} to {recording.loss[-5:].mean():.4g}"
    limits = f"limit 2^{recording.limit.min()} to 2^{recording.limit.max()}"
    tell(f"{network.name}, seed {seed}: {losses}, {limits}, {recording.seconds:.0f} s")
    return recording


def write_lines(
    path: Path | None, network: str, recording: Recording, results: Mapping[str, Result]
) -> None:
    """Add one line of JSON for each policy, for the floor and for bf16."""
    common = {
        "network": network,
        "seed": recording.seed,
        "steps": recording.steps,
        "every": recording.every,
    }
    for name, rows in (("floor", recording.rounding), ("bf16", recording.bfloat16)):
        means = recording.mean_over_time(rows)
        add_line(path, {**common, "policy": name, "cost": means, "error": means, "skips": 0})
    for name, result in results.items():
        line = {"policy": name, "cost": result.cost, "error": result.error, "skips": result.skips}
        exponents = [int(result.exponents[0]), int(result.exponents[-1])]
        more = {"room": result.room, "first_exponent": exponents[0], "last_exponent": exponents[1]}
        add_line(path, {**common, **line, **more})


# Comparisons.


def error_by_exponent(recordings: Sequence[Recording], part: str) -> dict[int, float]:
    """Return the mean error at each constant exponent, or at the limit where that is lower."""
    means = {}
    for exponent in range(CONSTANTS[-1] + 1):
        rows = [
            recording.errors_at(np.minimum(exponent, recording.limit.astype(np.int64)))
            for recording in recordings
        ]
        means[exponent] = mean_statistics(np.concatenate(rows))[part]
    return means


def best_error(recordings: Sequence[Recording], part: str) -> float:
    """Return the mean error at the best exponent of each measurement; NaN without one."""
    column = STATISTICS.index(part)
    best = []
    for recording in recordings:
        rows = recording.errors[:, :, column].astype(np.float64)
        lowest = np.where(np.isnan(rows), np.inf, rows).min(axis=1)
        is_there = np.isfinite(lowest)
        if is_there.any():
            times = recording.measured[is_there]
            best.append(np.interp(np.arange(recording.steps), times, lowest[is_there]).mean())
    return statistics.fmean(best) if best else math.nan


def needs_more(recordings: Sequence[Recording], exponent: int, part: str) -> bool:
    """Return whether the error at an exponent is clearly above that at the best exponent."""
    error, best = error_by_exponent(recordings, part)[exponent], best_error(recordings, part)
    return error > NEEDED_RATIO * best and error > best + NEEDED_DIFFERENCE


def bootstrap(differences: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the mean and its 95% interval; networks are drawn first, then their seeds.

    Args:
        differences: by network, by seed.
    """
    chance = np.random.default_rng(0)
    table: list[NDArray[np.float64]] = [np.array(row) for row in differences]
    mean = float(np.mean([row.mean() for row in table]))
    means = np.empty(DRAWS)
    # One draw of seeds for each network, many times; then networks among these.
    seeds = np.stack(
        [row[chance.integers(len(row), size=(DRAWS, len(row)))].mean(1) for row in table]
    )
    for draw in range(DRAWS):
        means[draw] = seeds[chance.integers(len(table), size=len(table)), draw].mean()
    low, high = np.quantile(means, (0.025, 0.975))
    return mean, float(low), float(high)


def find_worse(measured: Measured, policy: str, baseline: str, part: str) -> list[str]:
    """Return the networks on which a policy costs more than a baseline, beyond its interval.

    The interval is Student's over seeds, so there is none with a single seed.
    """
    worse = []
    for network in measured.results:
        pair = (measured.costs(network, name, part) for name in (policy, baseline))
        apart = [a - b for a, b in zip(*pair, strict=True)]
        if len(apart) < 2 or any(map(math.isnan, apart)):
            continue
        mean = statistics.fmean(apart)
        width = _QUANTILES.get(len(apart), 2.2) * statistics.stdev(apart) / math.sqrt(len(apart))
        if mean - width > 0 and mean > SMALLEST_DIFFERENCE:
            worse.append(f"{network} (+{mean:.4f} ± {width:.4f})")
    return worse


# Output.


def print_table(measured: Measured, part: str, names: Sequence[str]) -> None:
    """Print the cost of policies by network, means over seeds."""
    columns = ["floor", "bf16", *names, "best constant"]
    widths = [max(len(name), 8) + 2 for name in columns]
    header = "".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True))
    print(f"cost, {PART_NAMES[part]}\n{'':16}{header}   skips; room")
    sums: list[list[float]] = []
    for network, recordings in measured.recordings.items():
        if part == "attention" and not recordings[0].attention_blocks:
            continue
        floors = [r.mean_over_time(r.rounding)[part] for r in recordings]
        values = [statistics.fmean(floors)]
        values.append(statistics.fmean(r.mean_over_time(r.bfloat16)[part] for r in recordings))
        values += [statistics.fmean(measured.costs(network, name, part)) for name in names]
        best = measured.best_constant(network, part)
        values.append(statistics.fmean(measured.costs(network, constant_name(best), part)))
        sums.append(values)
        cells = "".join(f"{v:>{w}.4f}" for v, w in zip(values, widths, strict=True))
        results = measured.results[network]
        skips = ", ".join(str(sum(result[name].skips for result in results)) for name in names)
        rooms = [statistics.fmean(result[name].room for result in results) for name in names]
        room = ", ".join(f"{value:.1f}" for value in rooms)
        print(f"{network:16}{cells} (2^{best})   {skips}; {room}")
    means = np.nanmean(np.array(sums), axis=0)
    print(f"{'mean':16}{''.join(f'{v:>{w}.4f}' for v, w in zip(means, widths, strict=True))}\n")


PART_NAMES = {"all": "all blocks", "attention": "query and key blocks", "rest": "other blocks"}


def print_constants(measured: Measured, part: str) -> None:
    """Print the mean cost of each constant over networks."""
    means = {
        e: statistics.fmean(
            cost
            for network in measured.results
            for cost in measured.costs(network, constant_name(e), part)
        )
        for e in CONSTANTS
    }
    listed = ", ".join(f"2^{exponent} {mean:.4f}" for exponent, mean in means.items())
    print(f"mean cost of constants, {PART_NAMES[part]}: {listed}\n")


def print_comparison(measured: Measured, names: Sequence[str]) -> None:
    """Print differences to the baselines with intervals, and the networks that get worse."""
    for part in ("all", "attention"):
        chosen = [
            network
            for network, recordings in measured.recordings.items()
            if part == "all" or recordings[0].attention_blocks
        ]
        pairs = [(name, baseline) for baseline in BASELINES for name in names if name != baseline]
        for name, baseline in pairs if chosen else []:
            costs = [
                (measured.costs(network, name, part), measured.costs(network, baseline, part))
                for network in chosen
            ]
            apart = [[a - b for a, b in zip(*pair, strict=True)] for pair in costs]
            mean, low, high = bootstrap(apart)
            worse = ", ".join(find_worse(measured, name, baseline, part)) or "none"
            print(f"{name} - {baseline}, {PART_NAMES[part]}: {mean:+.4f} [{low:+.4f}, {high:+.4f}]")
            print(f"    worse beyond the interval over seeds: {worse}")
    print()


def print_needs(measured: Measured) -> None:
    """Print the networks for which an exponent is too low."""
    for part in ("all", "attention"):
        for exponent in NEEDED_EXPONENTS:
            needing = [
                network
                for network, recordings in measured.recordings.items()
                if needs_more(recordings, exponent, part)
            ]
            listed = ", ".join(needing) or "none"
            print(f"need a scale above 2^{exponent}, {PART_NAMES[part]}: {listed}")
    most = max(float(np.nanmax(r.repeat)) for rs in measured.recordings.values() for r in rs)
    print(f"largest error between two equal FP16 passes: {most:.2g}")


def draw_figure(path: Path, measured: Measured, names: Sequence[str]) -> None:
    """Draw the cost by policy, and the error by constant exponent."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    plt.rcParams["svg.hashsalt"] = "gradlift"
    networks = list(measured.results)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 2 + 0.24 * len(networks)))
    heights = np.arange(len(networks))
    first = [measured.recordings[network][0] for network in networks]
    floor = [recording.mean_over_time(recording.rounding)["all"] for recording in first]
    left.scatter(floor, heights, marker="|", color="#222222", label="floor", zorder=3)
    for place, name in enumerate(names):
        costs = [statistics.fmean(measured.costs(network, name)) for network in networks]
        left.scatter(costs, heights + 0.12 * (place - len(names) / 2), s=18, label=name)
    left.set(xscale="log", xlabel="cost (mean error, a skipped step counts 1)")
    left.set_yticks(heights, networks)
    left.invert_yaxis()
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    needing = [n for n in networks if needs_more(measured.recordings[n], 12, "all")]
    for network in networks:
        errors = error_by_exponent(measured.recordings[network], "all")
        style = {"label": network} if network in needing else {"color": "#bbbbbb", "lw": 0.8}
        right.plot(list(errors), list(errors.values()), **style)
    right.set(yscale="log", xlabel="exponent of a constant scale, or the limit if that is lower")
    right.set_ylabel("mean error")
    right.grid(alpha=0.3)
    if needing:
        right.legend(fontsize=8, title="needs more than 2^12")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def check_folder(name: str) -> Path:
    """Return a folder that exists."""
    path = Path(name)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.absolute()}")
    return path


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Network]]:
    """Return the arguments and the networks; an error ends the program with one line."""
    command = Command(
        __doc__,
        device="cpu",
        quick=f"{len(QUICK_NETWORKS)} networks, {QUICK_STEPS} steps, {QUICK_SEEDS} seed",
        json=True,
    )
    listed = f"of {', '.join(NETWORKS)} (all of these); or {', '.join(SLOW_NETWORKS)}"
    command.add_argument("--networks", nargs="+", metavar="NAME", help=listed)
    command.add_argument("--seeds", type=at_least(1), help="runs of each network (3)")
    command.add_argument("--steps", type=at_least(1), help="of each run (300)")
    command.add_argument("--every", type=at_least(1), default=10,
                         help="steps between measurements (%(default)s)")  # fmt: skip
    command.add_argument("--recordings", type=check_folder, metavar="FOLDER",
                         help="keep recordings here, and reuse those that exist")  # fmt: skip
    command.add_argument("--arms", action="store_true",
                         help="also run the scaler objects; slow")  # fmt: skip
    command.add_argument("--figure", type=check_target, metavar="PATH",
                         help="draw one figure, .svg or .png")  # fmt: skip
    arguments = command.parse_args(argv)
    names = arguments.networks or (QUICK_NETWORKS if arguments.quick else tuple(NETWORKS))
    try:
        networks = choose(names)
    except ValueError as error:
        command.error(str(error))
    return arguments, networks


def main(argv: Sequence[str] | None = None) -> None:
    """Record or load every run, replay the policies, and print the tables."""
    arguments, networks = parse(argv)
    steps = arguments.steps or (QUICK_STEPS if arguments.quick else 300)
    seeds = arguments.seeds or (QUICK_SEEDS if arguments.quick else 3)
    environment = begin(arguments.device, one_thread=arguments.device.type == "cpu")
    if arguments.json is not None:
        arguments.json.write_text("")
        add_line(arguments.json, {"environment": environment})
    names = list(list_policies())
    measured = Measured({}, {})
    for network in networks:
        for seed in range(seeds):
            recording = get_recording(network, seed, arguments, steps)
            results = replay_all(recording)
            if arguments.arms:
                results |= dict(run_arms(network, recording, list_arms(), arguments.device))
                tell(f"{network.name}, seed {seed}: scalers done")
            measured.recordings.setdefault(network.name, []).append(recording)
            measured.results.setdefault(network.name, []).append(results)
            write_lines(arguments.json, network.name, recording, results)
    if arguments.arms:
        names += [arm.name for arm in list_arms()]
    parts = ["all"]
    if any(recordings[0].attention_blocks for recordings in measured.recordings.values()):
        parts.append("attention")
    for part in parts:
        print_table(measured, part, names)
    print_constants(measured, "all")
    print_comparison(measured, names)
    print_needs(measured)
    if arguments.figure is not None:
        draw_figure(arguments.figure, measured, names)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        main()
