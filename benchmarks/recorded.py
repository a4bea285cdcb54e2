"""Records the FP16 limits and errors of one float32 run, and replays loss-scale policies over them.

All policies are compared on one float32 trajectory, so they see the same weights and batches.
Each step stores the limit, the largest exponent at which the FP16 backward pass overflows nowhere,
and the largest gradient of that pass. Some steps are measured: they also store the error of the
FP16 gradients by exponent. A policy is then replayed in milliseconds, without training again::

    skipped step = policy exponent > limit
    cost         = (1 - skip rate) * mean error of the steps that were applied + skip rate

The error of a block of rows is ``min(|g - g32| / |g32|, 1)``. Blocks whose gradient is zero are
left out, as are blocks whose float32 gradient is only rounding noise (``NOISE``).

On a CPU, products of float16 tensors are computed in float32 and rounded once, as tensor cores do
(``HalfProducts``). This is eight times as fast as torch's own float16 products there.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.catalogue import to
from gradlift import policy as policies

MIN_EXPONENT, MAX_EXPONENT = -30, 40
SWEEP = 31
"""Exponents of one measurement: the limit and 30 below it."""
SWEEP_STRIDE = 4
MIN_SWEPT = -12
NO_LIMIT = -128
"""Limit of a step that overflows at every exponent."""
NOISE = 0.05
"""Error of a float32 gradient against float64 above which the block is left out."""
SETTLED_STEP = 30
"""First step that counts for the room."""
SMALLEST = 2.0**-25
"""Float16 flushes numbers below this to zero."""
ATTENTION = ("query", "key")

Grads = list[Tensor | None]


@dataclass
class Task:
    """A model with its data and recipe.

    Args:
        model: in training mode, on the CPU.
        batch: returns the batch of a step, on the CPU.
        loss: returns a 0-d tensor from a model and a batch.
        optimizer: over the parameters of the model.
        schedule: returns the factor of the learning rate of a step; None for a constant rate.
        max_norm: clips the gradient norm; None clips nothing.
        blocks: labels of the equal row blocks of a parameter, by the name of the parameter.
    """

    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Optimizer
    schedule: Callable[[int], float] | None = None
    max_norm: float | None = None
    blocks: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Network(NamedTuple):
    """A named recipe; ``make`` returns its task for a seed."""

    name: str
    make: Callable[[int], Task]


# Arithmetic.

_ATEN = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN.convolution.default,
        _ATEN.convolution_backward.default,
    }
)
_ATTENTION_NAMES = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")


class HalfProducts(TorchDispatchMode):
    """Computes float16 products in float32 and rounds each result once to float16."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if func not in _PRODUCTS or not any(_is_half(value) for value in args):
            return func(*args, **kwargs)
        wide = [value.float() if isinstance(value, Tensor) else value for value in args]
        result = func(*wide, **kwargs)
        if isinstance(result, Tensor):
            return result.half()
        return tuple(None if part is None else part.half() for part in result)


class RoundedForward(TorchDispatchMode):
    """Rounds as FP16 autocast does, but stores float32, so that the backward pass is float32.

    A cast to float16 returns the rounded values in float32. Products and attention then run in
    float32, and their results are rounded in the same way. Autograd sees straight-through casts.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if func is _ATEN._to_copy.default and kwargs.get("dtype") == torch.float16:
            return _round(func(*args, **{**kwargs, "dtype": torch.float32}))
        result = func(*args, **kwargs)
        if func in _PRODUCTS:
            return _round(result)
        if func._schema.name.split("::")[1].startswith(_ATTENTION_NAMES):
            return (_round(result[0]), *result[1:])
        return result


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float16


def _round(value: Tensor) -> Tensor:
    return value.half().float()


def half_products(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return ``HalfProducts`` on a CPU; other devices have fast products of their own."""
    return HalfProducts() if device.type == "cpu" else contextlib.nullcontext()


# Blocks and errors.


class Block(NamedTuple):
    """Rows ``begin`` to ``end`` of one parameter; ``end`` is None for the whole parameter."""

    parameter: int
    begin: int
    end: int | None
    is_attention: bool
    """Whether the rows compute queries or keys."""


def find_blocks(model: nn.Module, labels: Mapping[str, Sequence[str]]) -> list[Block]:
    """Return the blocks of all parameters with a gradient; unlabelled parameters are one block."""
    blocks = []
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for unknown in set(labels) - set(names):
        raise ValueError(f"blocks names {unknown!r}, which is not a trained parameter of the model")
    for number, name in enumerate(names):
        rows = model.get_parameter(name).shape[0] if name in labels else 0
        parts = labels.get(name, ("",))
        if len(parts) == 1:
            blocks.append(Block(number, 0, None, parts[0] in ATTENTION))
            continue
        if rows % len(parts):
            raise ValueError(f"{name} has {rows} rows, which {len(parts)} blocks do not share")
        size = rows // len(parts)
        for place, label in enumerate(parts):
            blocks.append(Block(number, place * size, (place + 1) * size, label in ATTENTION))
    return blocks


def block_errors(found: Grads, true: Grads, blocks: Sequence[Block]) -> NDArray[np.float64]:
    """Return the error of each block, capped at 1; NaN for blocks whose true gradient is zero."""
    sizes, apart = [], []
    for block in blocks:
        expected, value = true[block.parameter], found[block.parameter]
        if expected is None:
            sizes.append(torch.zeros(()))
            apart.append(torch.zeros(()))
            continue
        if value is None:
            value = torch.zeros_like(expected)
        rows = slice(block.begin, block.end) if block.end is not None else ...
        sizes.append(torch.linalg.vector_norm(expected[rows], dtype=torch.float64))
        difference = value[rows].double() - expected[rows].double()
        apart.append(torch.linalg.vector_norm(difference))
    device = next(grad.device for grad in true if grad is not None)
    size = torch.stack([part.to(device).double() for part in sizes]).cpu().numpy()
    distance = torch.stack([part.to(device).double() for part in apart]).cpu().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.where(size > 0, distance / size, np.nan)
    errors = np.where(np.isnan(errors) & (size > 0), 1.0, errors)
    return np.minimum(errors, 1.0)


STATISTICS = ("all", "attention", "rest", "median", "p90", "worst")
"""Means over all blocks, over query/key blocks and over the rest, then quantiles over all."""


def summarize(errors: NDArray[np.float64], is_attention: NDArray[np.bool_]) -> list[float]:
    """Return the ``STATISTICS`` of block errors; NaN where there is no such block."""
    valid = ~np.isnan(errors)
    chosen = errors[valid]
    if not len(chosen):
        return [math.nan] * len(STATISTICS)

    def mean(part: NDArray[np.bool_]) -> float:
        return float(errors[part & valid].mean()) if (part & valid).any() else math.nan

    everything = np.ones_like(is_attention)
    quantiles = [float(np.quantile(chosen, q)) for q in (0.5, 0.9, 1.0)]
    return [mean(everything), mean(is_attention), mean(~is_attention), *quantiles]


# The trajectory.


class Trajectory:
    """A float32 run, one step at a time."""

    def __init__(self, network: Network, seed: int, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.task = network.make(seed)
        self.seed, self.device = seed, device
        self.model = self.task.model.to(device).train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.blocks = find_blocks(self.model, self.task.blocks)
        self.is_attention = np.array([block.is_attention for block in self.blocks])
        self.rates = [group["lr"] for group in self.task.optimizer.param_groups]

    def batch(self, step: int) -> Any:
        """Return the batch of a step on the device."""
        return to(self.task.batch(step), self.device)

    def loss(self, step: int, batch: Any, model: nn.Module | None = None) -> Tensor:
        """Return the loss; the random numbers of a step are equal in every forward pass."""
        torch.manual_seed(1_000_003 * self.seed + step)
        return self.task.loss(self.model if model is None else model, batch)

    def grads(self, loss: Tensor, keep: bool = False) -> Grads:
        """Return the gradient of every trained parameter; None for parameters without one."""
        return list(
            torch.autograd.grad(loss, self.parameters, allow_unused=True, retain_graph=keep)
        )

    def advance(self, step: int, grads: Grads) -> None:
        """Apply one optimizer step with float32 gradients."""
        optimizer = self.task.optimizer
        factor = 1.0 if self.task.schedule is None else self.task.schedule(step)
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        if self.task.max_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.task.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters and buffers into a copy of the model, which may have another dtype."""
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs)
        for ours, theirs in zip(target.buffers(), source.buffers(), strict=True):
            ours.copy_(theirs)


def largest_of(grads: Grads) -> float:
    """Return the largest magnitude; inf if any gradient is inf or NaN."""
    there = [grad for grad in grads if grad is not None and grad.numel()]
    if not there:
        return 0.0
    norms = torch._foreach_norm(there, math.inf)
    value = float(torch.stack([norm.double() for norm in norms]).max())
    return value if math.isfinite(value) else math.inf


def widen(batch: Any) -> Any:
    """Return the batch with its float tensors in float64, at any depth."""
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: widen(part) for key, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(widen(part) for part in batch)
    return batch


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new float tensors of this dtype inside a ``with`` block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Scaled:
    """The FP16 forward pass of one step, with a backward pass for each exponent."""

    def __init__(self, trajectory: Trajectory, step: int, batch: Any) -> None:
        self.trajectory = trajectory
        autocast = torch.autocast(trajectory.device.type, torch.float16)
        with half_products(trajectory.device), autocast:
            self.loss = trajectory.loss(step, batch)
        self.is_finite = math.isfinite(float(self.loss.detach()))
        self.peaks: dict[int, list[float]] = {}
        """By exponent, the largest scaled gradient of each parameter."""

    def grads(self, exponent: int) -> Grads:
        """Return the scaled gradients."""
        with half_products(self.trajectory.device):
            return self.trajectory.grads(self.loss.float() * 2.0**exponent, keep=True)

    def unscaled(self, exponent: int) -> Grads:
        """Return the gradients divided by the scale."""
        factor = 2.0**-exponent
        return [None if grad is None else grad * factor for grad in self.grads(exponent)]

    def is_clean(self, exponent: int) -> bool:
        """Return whether every gradient is finite at this exponent."""
        self.peaks[exponent] = [largest_of([grad]) for grad in self.grads(exponent)]
        return all(map(math.isfinite, self.peaks[exponent]))

    def find_limit(self, start: int) -> int:
        """Return the largest exponent without an overflow, searched from ``start`` on."""
        if not self.is_finite:
            return NO_LIMIT
        exponent = min(max(start, MIN_EXPONENT), MAX_EXPONENT)
        if self.is_clean(exponent):
            while exponent < MAX_EXPONENT and self.is_clean(exponent + 1):
                exponent += 1
            return exponent
        while exponent > MIN_EXPONENT:
            exponent -= 1
            if self.is_clean(exponent):
                return exponent
        return NO_LIMIT


# Recordings.


@dataclass
class Recording:
    """One run, as ``record`` measures it. S steps, M measurements, ``SWEEP`` exponents."""

    network: str
    seed: int
    every: int
    blocks: int
    attention_blocks: int
    seconds: float
    loss: NDArray[np.float32]
    """(S,) of the float32 pass."""
    largest: NDArray[np.float32]
    """(S,) largest gradient of the FP16 pass over all parameters, unscaled."""
    largest_half: NDArray[np.float32]
    """(S,) the same over parameters whose FP16 gradient comes out of half precision."""
    limit: NDArray[np.int16]
    """(S,) largest exponent without an overflow; ``NO_LIMIT`` if there is none."""
    bad_loss: NDArray[np.bool_]
    """(S,) whether the loss of the FP16 forward pass was inf or NaN."""
    measured: NDArray[np.int32]
    """(M,) steps."""
    errors: NDArray[np.float16]
    """(M, SWEEP, statistics): entry k of a row is the error at exponent limit - k."""
    bfloat16: NDArray[np.float16]
    """(M, statistics) error of bf16 autocast without a scale."""
    rounding: NDArray[np.float16]
    """(M, statistics) error of an FP16 forward pass with a float32 backward pass: the floor."""
    repeat: NDArray[np.float16]
    """(M, statistics) error between two equal FP16 backward passes at the limit."""
    left_out: NDArray[np.int32]
    """(M,) blocks without a gradient beyond rounding noise."""

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return len(self.loss)

    def save(self, path: Path) -> None:
        """Write a compressed .npz."""
        # The temporary name keeps readers from a file that is half written.
        partial = path.with_suffix(".part.npz")
        values = {part.name: np.asarray(getattr(self, part.name)) for part in fields(self)}
        np.savez_compressed(partial, **values)  # pyright: ignore[reportArgumentType]
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Return the recording of a file that ``save`` wrote."""
        with np.load(path) as file:
            values = {name: file[name] for name in file.files}
        plain = {name: value.item() for name, value in values.items() if not value.ndim}
        return cls(**{**values, **plain})

    def errors_at(self, exponents: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the statistics of every step at one exponent each: (S, statistics).

        They are interpolated in time between the measurements before and after the step, each at
        the same exponent, or at its own limit if that is lower.
        """
        usable = np.flatnonzero(self.limit[self.measured] != NO_LIMIT)
        if not len(usable):
            return np.ones((self.steps, len(STATISTICS)))
        times = self.measured[usable]
        steps = np.arange(self.steps)
        after = np.clip(np.searchsorted(times, steps), 0, len(usable) - 1)
        before = np.clip(np.searchsorted(times, steps, "right") - 1, 0, len(usable) - 1)
        apart = np.maximum(times[after] - times[before], 1)
        part = np.clip((steps - times[before]) / apart, 0, 1)[:, None]
        first, second = (self._rows(usable[place], exponents) for place in (before, after))
        # A statistic may be missing in one of the two: its blocks had no gradient.
        first = np.where(np.isnan(first), second, first)
        second = np.where(np.isnan(second), first, second)
        return (1 - part) * first + part * second

    def mean_over_time(self, rows: NDArray[np.floating[Any]]) -> dict[str, float]:
        """Return the means over all steps of (M, statistics), interpolated between measurements."""
        means = {}
        for name, column in zip(STATISTICS, np.asarray(rows, np.float64).T, strict=True):
            there = ~np.isnan(column)
            means[name] = math.nan
            if there.any():
                values = np.interp(np.arange(self.steps), self.measured[there], column[there])
                means[name] = float(values.mean())
        return means

    def _rows(self, places: NDArray[np.int64], exponents: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the rows of measurements, each at its exponent: (S, statistics)."""
        below = self.limit[self.measured[places]].astype(np.int64) - exponents
        return self.errors[places, np.clip(below, 0, SWEEP - 1)].astype(np.float64)


def record(
    network: Network,
    seed: int,
    steps: int,
    every: int,
    device: torch.device,
    report: Callable[[int, float], None] | None = None,
) -> Recording:
    """Run one float32 trajectory and measure FP16 gradients along it.

    Args:
        network: the model and its recipe.
        seed: of the weights and batches.
        steps: of the run.
        every: steps between two measurements; step 0 is the first.
        device: of the run.
        report: called after each step with its number and loss.

    Returns:
        The recording.
    """
    begin = time.monotonic()
    trajectory = Trajectory(network, seed, device)
    measurer = Measurer(trajectory)
    columns: dict[str, list[Any]] = {name: [] for name in ("loss", "largest", "half", "limit")}
    bad_loss: list[bool] = []
    rows: list[Measurement] = []
    start, half = 16, None
    for step in range(steps):
        batch = trajectory.batch(step)
        loss = trajectory.loss(step, batch)
        true = trajectory.grads(loss)
        scaled = Scaled(trajectory, step, batch)
        limit = scaled.find_limit(start)
        start = start if limit == NO_LIMIT else limit
        if half is None and limit != NO_LIMIT:
            half = find_half(scaled.grads(limit))
        if step % every == 0:
            rows.append(measurer.measure(step, batch, scaled, limit, true))
        columns["loss"].append(float(loss.detach()))
        peaks = [] if limit == NO_LIMIT else scaled.peaks[limit]
        unscaled = [peak * 2.0**-limit for peak in peaks] or [largest_of(true)]
        columns["largest"].append(max(unscaled))
        chosen = [peak for peak, is_half in zip(unscaled, half or [], strict=False) if is_half]
        columns["half"].append(max(chosen, default=columns["largest"][-1]))
        columns["limit"].append(limit)
        bad_loss.append(not scaled.is_finite)
        del scaled
        trajectory.advance(step, true)
        if report is not None:
            report(step, columns["loss"][-1])
    return Recording(
        network=network.name,
        seed=seed,
        every=every,
        blocks=len(trajectory.blocks),
        attention_blocks=int(trajectory.is_attention.sum()),
        seconds=time.monotonic() - begin,
        loss=np.array(columns["loss"], np.float32),
        largest=np.array(columns["largest"], np.float32),
        largest_half=np.array(columns["half"], np.float32),
        limit=np.array(columns["limit"], np.int16),
        bad_loss=np.array(bad_loss, np.bool_),
        measured=np.arange(0, steps, every, dtype=np.int32),
        errors=np.array([row.errors for row in rows], np.float16),
        bfloat16=np.array([row.bfloat16 for row in rows], np.float16),
        rounding=np.array([row.rounding for row in rows], np.float16),
        repeat=np.array([row.repeat for row in rows], np.float16),
        left_out=np.array([row.left_out for row in rows], np.int32),
    )


def find_half(grads: Grads) -> list[bool]:
    """Return which gradients come out of half precision: float16 represents each element."""
    return [
        grad is not None and bool(grad.any()) and bool((grad.half().float() == grad).all())
        for grad in grads
    ]


class Measurement(NamedTuple):
    """The statistics of one step; see ``Recording``."""

    errors: list[list[float]]
    bfloat16: list[float]
    rounding: list[float]
    repeat: list[float]
    left_out: int


def fill_sweep(measure: Callable[[int], list[float]], last: int) -> list[list[float]]:
    """Return the statistics at 0 to ``SWEEP - 1`` powers of two below the limit.

    Every fourth exponent is measured. Those between two are measured unless all means agree to 2%:
    then nothing underflows there, and they are interpolated. The sweep ends where all is lost.
    """
    rows = {0: measure(0)}
    for begin in range(0, last, SWEEP_STRIDE):
        end = min(begin + SWEEP_STRIDE, last)
        rows[end] = measure(end)
        first, second = np.array(rows[begin]), np.array(rows[end])
        is_flat = np.isclose(first, second, rtol=0.02, atol=1e-5, equal_nan=True)[:3].all()
        for place in range(begin + 1, end):
            part = (place - begin) / (end - begin)
            rows[place] = (
                ((1 - part) * first + part * second).tolist() if is_flat else measure(place)
            )
        if rows[end][0] >= 0.9999:
            break
    return [rows[min(place, max(rows))] for place in range(SWEEP)]


class Measurer:
    """Measures the errors of one step by exponent and by arithmetic."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.double = copy.deepcopy(trajectory.model).double()

    def measure(
        self, step: int, batch: Any, scaled: Scaled, limit: int, true: Grads
    ) -> Measurement:
        """Return all statistics of a step."""
        valid = self.find_valid(step, batch, true)
        whole = np.where(valid, 1.0, np.nan)
        nothing = self._summarize(whole)

        def compare(found: Grads, expected: Grads = true) -> list[float]:
            errors = block_errors(found, expected, self.trajectory.blocks)
            return self._summarize(np.where(valid, errors, np.nan))

        sweep, repeat = [nothing] * SWEEP, nothing
        if limit != NO_LIMIT:
            first = scaled.unscaled(limit)
            repeat = compare(scaled.unscaled(limit), first)
            lowest = min(limit, max(limit - SWEEP + 1, MIN_SWEPT))
            sweep = fill_sweep(
                lambda below: compare(scaled.unscaled(limit - below)), limit - lowest
            )
        return Measurement(
            errors=sweep,
            bfloat16=compare(self._bfloat16(step, batch)),
            rounding=compare(self._rounded(step, batch)),
            repeat=repeat,
            left_out=int((~valid).sum()),
        )

    def _summarize(self, errors: NDArray[np.float64]) -> list[float]:
        return summarize(errors, self.trajectory.is_attention)

    def find_valid(self, step: int, batch: Any, true: Grads) -> NDArray[np.bool_]:
        """Return the blocks whose float32 gradient is close to that of float64."""
        copy_weights(self.trajectory.model, self.double)
        wanted = [p for p in self.double.parameters() if p.requires_grad]
        with default_dtype(torch.float64):
            loss = self.trajectory.loss(step, widen(batch), self.double)
            exact: Grads = list(torch.autograd.grad(loss, wanted, allow_unused=True))
        errors = block_errors(true, exact, self.trajectory.blocks)
        return np.nan_to_num(errors, nan=1.0) <= NOISE

    def _bfloat16(self, step: int, batch: Any) -> Grads:
        with torch.autocast(self.trajectory.device.type, torch.bfloat16):
            loss = self.trajectory.loss(step, batch)
        return self.trajectory.grads(loss.float())

    def _rounded(self, step: int, batch: Any) -> Grads:
        with RoundedForward(), torch.autocast(self.trajectory.device.type, torch.float16):
            loss = self.trajectory.loss(step, batch)
        return self.trajectory.grads(loss)


# Policies.


class Policy(Protocol):
    """A rule for the loss scale."""

    @property
    def exponent(self) -> int:
        """Return the loss exponent of the next step."""
        ...

    def saw(self, found_inf: bool, loss_finite: bool, largest: float) -> None:
        """Advance by one step.

        Args:
            found_inf: whether the step was skipped.
            loss_finite: whether the loss of the forward pass was finite.
            largest: the largest unscaled gradient; 0 if it underflows, inf if it overflows.
        """
        ...


@dataclass
class Constant:
    """A constant scale."""

    exponent: int

    def saw(self, found_inf: bool, loss_finite: bool, largest: float) -> None:
        """Keep the exponent."""


class FromPolicy:
    """Any policy of gradlift: an object with ``init()`` that ``gradlift.policy.update`` takes."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.state = policy.init()
        # Versions without gradlift.Predictive do not have the argument.
        self.takes_largest = "largest" in inspect.signature(policies.update).parameters

    @property
    def exponent(self) -> int:
        """Return the loss exponent of the next step."""
        return math.frexp(float(self.state.scale))[1] - 1

    def saw(self, found_inf: bool, loss_finite: bool, largest: float) -> None:
        """Advance the state by one step."""
        more: dict[str, Any] = {"largest": largest} if self.takes_largest else {}
        update = policies.update
        self.state = update(self.policy, self.state, found_inf, loss_finite=loss_finite, **more)


class Torch(FromPolicy):
    """``torch.amp.GradScaler``, which also backs off after a non-finite loss."""

    def __init__(self, growth_interval: int = 2000, init_scale: float = 2.0**16) -> None:
        numbers = {"growth_interval": growth_interval, "init_scale": init_scale}
        super().__init__(policies.Dynamic.torch(**numbers))

    def saw(self, found_inf: bool, loss_finite: bool, largest: float) -> None:
        """Advance the state by one step."""
        super().saw(found_inf, True, largest)


@dataclass(frozen=True)
class Result:
    """A policy on one recording; the keys of each mapping are ``STATISTICS``."""

    cost: dict[str, float]
    error: dict[str, float]
    """Mean over the steps that were applied."""
    skips: int
    room: float
    """Median over steps of limit - exponent, from ``SETTLED_STEP`` on."""
    exponents: NDArray[np.int64]
    """(S,)."""


def replay(recording: Recording, policy: Policy, half: bool = False) -> Result:
    """Run a policy over a recording.

    Args:
        recording: of one run.
        policy: in its first state; it is changed.
        half: give the policy the largest gradient of half precision, not that of all parameters.

    Returns:
        Its cost, errors and exponents.
    """
    largest = (recording.largest_half if half else recording.largest).astype(np.float64)
    exponents = np.empty(recording.steps, np.int64)
    skipped = np.empty(recording.steps, np.bool_)
    for step in range(recording.steps):
        exponent = policy.exponent
        exponents[step] = exponent
        skipped[step] = exponent > recording.limit[step]
        seen = float(largest[step])
        if skipped[step]:
            seen = math.inf
        elif seen * 2.0**exponent < SMALLEST:
            seen = 0.0
        policy.saw(bool(skipped[step]), not recording.bad_loss[step], seen)
    return make_result(recording, exponents, skipped, recording.errors_at(exponents))


def make_result(
    recording: Recording,
    exponents: NDArray[np.int64],
    skipped: NDArray[np.bool_],
    errors: NDArray[np.float64],
) -> Result:
    """Return the result of the exponents, skips and statistics (S, statistics) of all steps."""
    rate = float(skipped.mean())
    error = mean_statistics(errors[~skipped])
    cost = {name: (1 - rate) * value + rate for name, value in error.items()}
    is_settled = (np.arange(recording.steps) >= SETTLED_STEP) & (recording.limit != NO_LIMIT)
    room = (recording.limit.astype(np.int64) - exponents)[is_settled]
    middle = float(np.median(room)) if len(room) else math.nan
    return Result(cost, error, int(skipped.sum()), middle, exponents)


def mean_statistics(rows: NDArray[np.floating[Any]]) -> dict[str, float]:
    """Return the mean of each of the ``STATISTICS`` over rows; 1 without a row."""
    if not len(rows):
        return dict.fromkeys(STATISTICS, 1.0)
    table = np.asarray(rows, np.float64)
    means = [float(c[~np.isnan(c)].mean()) if (~np.isnan(c)).any() else math.nan for c in table.T]
    return dict(zip(STATISTICS, means, strict=True))


# Scalers.


class ScalerArm:
    """A scaler object that runs in lock-step on a copy of the trajectory's model.

    Its optimizer has a learning rate of 0, and the weights are copied before every step.

    Args:
        name: of the arm.
        make: returns the scaler from the copy of the model and the device type.
    """

    def __init__(self, name: str, make: Callable[[nn.Module, str], Any]) -> None:
        self.name, self.make = name, make

    def begin(self, trajectory: Trajectory) -> None:
        """Copy the model and build the scaler."""
        self.model = copy.deepcopy(trajectory.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.0)
        self.scaler = self.make(self.model, trajectory.device.type)
        self.exponents: list[float] = []
        self.skipped: list[bool] = []

    def step(self, trajectory: Trajectory, step: int, batch: Any) -> Grads:
        """Run one step at the trajectory's weights and return the unscaled gradients."""
        copy_weights(trajectory.model, self.model)
        self.optimizer.zero_grad(set_to_none=True)
        with half_products(trajectory.device):
            with torch.autocast(trajectory.device.type, torch.float16):
                loss = trajectory.loss(step, batch, self.model)
            scaled = self.scaler.scale(loss.float())
            self.exponents.append(math.log2(self.scaler.get_scale()))
            scaled.backward()
        self.scaler.unscale_(self.optimizer)
        grads: Grads = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        self.skipped.append(not math.isfinite(largest_of(grads)))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return grads

    def close(self) -> None:
        """Remove the hooks of the scaler, if it has any."""
        if hasattr(self.scaler, "close"):
            self.scaler.close()


def run_arms(
    network: Network, recording: Recording, arms: Sequence[ScalerArm], device: torch.device
) -> Iterator[tuple[str, Result]]:
    """Repeat the trajectory of a recording with scalers next to it.

    Args:
        network: that of the recording.
        recording: gives the seed, the steps, the measured steps and the limits.
        arms: the scalers.
        device: that of the recording.

    Yields:
        The name of each arm and its result.
    """
    trajectory = Trajectory(network, recording.seed, device)
    measurer = Measurer(trajectory)
    rows: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
    for arm in arms:
        arm.begin(trajectory)
    measured = set(recording.measured.tolist())
    valid = np.ones(len(trajectory.blocks), np.bool_)
    for step in range(recording.steps):
        batch = trajectory.batch(step)
        true = trajectory.grads(trajectory.loss(step, batch))
        if step in measured:
            valid = measurer.find_valid(step, batch, true)
        for arm in arms:
            errors = block_errors(arm.step(trajectory, step, batch), true, trajectory.blocks)
            masked = np.where(valid, errors, np.nan)
            rows[arm.name].append(summarize(masked, trajectory.is_attention))
        trajectory.advance(step, true)
    for arm in arms:
        arm.close()
        exponents = np.round(arm.exponents).astype(np.int64)
        skipped, errors = np.array(arm.skipped), np.array(rows[arm.name])
        yield arm.name, make_result(recording, exponents, skipped, errors)
