"""Policies: when the loss scale changes, and by how much. One pure rule for every framework.

``Static`` and ``Dynamic``, in pseudo-code::

    overflow, loss finite:      patience -= 1, clean = 0
                                out of patience: scale = max(scale * backoff_factor, min_scale)
    overflow, loss not finite:  clean = 0; no scale can mend a forward pass
    no overflow:                clean += 1
                                clean = growth_delay + growth_interval: clean = growth_delay,
                                patience refilled, scale = min(scale * growth_factor, max_scale)

``Predictive`` keeps ``peak``, the largest recent gradient, and ``gap``, the powers of two by which
something unseen exceeds it::

    overflow, loss finite:      the step before was clean: gap += 1
                                scale /= 2**BACKOFF, peak = the gradient that fits this scale
    overflow, loss not finite:  nothing changes
    a gradient was measured:    peak = max(largest, peak * LEAK), gap -= GAP_LEAK
    nothing but zeros:          every ZEROS steps scale *= 2, up to FIRST_GUESS
    then:                       scale = 2**(15 - headroom - floor(gap)) / peak, a power of two

``update`` takes the framework's ``where`` (a Python ternary, ``torch.where``, ``jnp.where`` or
``keras.ops.where``), so all frameworks run the same lines. Every product is rounded to float32.
(A framework that multiplies in float32 rounds the factor first. With a factor of 1.1 or 0.7,
``Dynamic`` may differ there in the last bit from Python and torch, which multiply in float64.
``Predictive`` is equal everywhere: its products are powers of two, but for one.)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

# Between these both the scale and its inverse are finite and not 0 in float32.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = (2.0 - 2.0**-23) * 2.0**127

ON_FLOOR = ("hold", "warn", "raise")

Where = Callable[[Any, Any, Any], Any]

# Of ``Predictive``. ``benchmarks/results/NOTES.md`` says what each of them buys.
LEAK = 0.9330329895019531
"""2**-0.1 in float32: the part of the peak that is left after a step."""
BACKOFF = 6
"""Powers of two by which an overflow lowers the scale: nobody knows how far it went."""
GAP_LEAK = 2.0**-12
"""Powers of two by which the gap shrinks in a clean step."""
LARGEST_GAP = 12.0
ZEROS = 100
"""Steps with nothing but zeros after which the scale doubles."""
FIRST_GUESS = 2.0**16
"""The scale that zeros may lead to, and torch's first one."""
FULL = 1.875
"""Mantissa of a peak that was not measured: as large as its scale allows, nearly."""
UNKNOWN = -1.0
"""The largest gradient of a step in which nothing was measured."""
LARGEST_EXPONENT = 15  # of float16
NO_GRADIENT = 2.0**-112
"""Smaller gradients count as zero: the scale for them would be infinite in float32."""


class ScaleState(NamedTuple):
    """What the rule remembers between steps.

    Each field is a Python number or a 0-d array of the framework at hand: ``scale`` float32,
    ``growth_tracker`` and ``hysteresis_tracker`` int32, all on one device.
    """

    scale: Any
    growth_tracker: Any
    """Clean steps since a step was skipped, or since the scale grew, beyond ``growth_delay``.
    ``Predictive``: steps in a row with nothing but zeros."""
    hysteresis_tracker: Any
    """Overflows that may still pass before the scale backs off; starts at ``hysteresis``.
    ``Predictive``: 0 after an overflow, 1 after a clean step."""
    peak: Any = 0.0
    """``Predictive``: the largest recent gradient, unscaled, float32; 0 before any."""
    gap: Any = 0.0
    """``Predictive``: powers of two by which something unseen exceeds the peak, float32."""


@dataclass(frozen=True)
class Static:
    """A constant scale. Overflowing steps are skipped, the scale stays.

    Examples:
        >>> Static(2.0**10).init().scale
        1024.0
    """

    init_scale: float = 2.0**16

    # The rule's other numbers, so that one rule serves both policies: nothing ever changes.
    growth_factor = 1.0
    backoff_factor = 1.0
    growth_interval = 2**31 - 1
    hysteresis = 1
    consecutive_hysteresis = False
    growth_delay = 0
    min_scale = SMALLEST_SCALE
    max_scale = LARGEST_SCALE
    on_floor = "hold"

    def __post_init__(self) -> None:
        _store(self, "init_scale", _scale_value(self.init_scale, "init_scale"))

    def init(self) -> ScaleState:
        """Return the state before the first step, in Python numbers."""
        return ScaleState(self.init_scale, 0, 1)


@dataclass(frozen=True)
class Dynamic:
    """A scale that backs off on overflow and grows after a run of clean steps.

    Args:
        init_scale: the scale of the first step.
        growth_factor: multiplies the scale after ``growth_interval`` clean steps; above 1.
        backoff_factor: multiplies the scale on overflow; between 0 and 1.
        growth_interval: consecutive clean steps before the scale grows.
        hysteresis: the scale backs off at this many overflows; each of them is skipped.
        consecutive_hysteresis: refill that count at every clean step, and not only on growth.
        min_scale: the scale never falls below this.
        max_scale: the scale never grows above this.
        on_floor: what to do when an overflow finds the scale at ``min_scale``: ``"hold"`` it
            silently, ``"warn"`` once, ``"raise"``, or a callable that gets the scaler.
        growth_delay: clean steps at the start, and after each overflow, that count for no growth.

    Examples:
        >>> policy = Dynamic(init_scale=8.0, growth_interval=2)
        >>> state = policy.init()
        >>> for found_inf in (True, False, False):
        ...     state = update(policy, state, found_inf)
        >>> state.scale
        8.0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**127
    on_floor: str | Callable[[Any], object] = "warn"
    growth_delay: int = 0

    def __post_init__(self) -> None:
        for name in ("init_scale", "min_scale", "max_scale"):
            _store(self, name, _scale_value(getattr(self, name), name))
        growth = _store(self, "growth_factor", _number(self.growth_factor, "growth_factor"))
        if not 1.0 < growth < math.inf:
            raise ValueError(
                f"growth_factor must be a finite number above 1, got {growth!r}; "
                "for a scale that never changes use Static(init_scale)"
            )
        backoff = _store(self, "backoff_factor", _number(self.backoff_factor, "backoff_factor"))
        if not 0.0 < backoff < 1.0:
            raise ValueError(f"backoff_factor must lie between 0 and 1, got {backoff!r}")
        for name in ("growth_interval", "hysteresis"):
            _store(self, name, _count(getattr(self, name), name))
        _count(self.growth_delay, "growth_delay", least=0)
        if not isinstance(self.consecutive_hysteresis, bool):
            raise ValueError(
                f"consecutive_hysteresis must be True or False, got {self.consecutive_hysteresis!r}"
            )
        _check_bounds(self)

    def init(self) -> ScaleState:
        """Return the state before the first step, in Python numbers."""
        return ScaleState(self.init_scale, 0, self.hysteresis)

    # What other systems do, each as one policy. Settings that a system leaves unbounded take
    # the widest bound here, since a scale of 0 or inf serves nobody.

    @classmethod
    def torch(cls, **changes: Any) -> Dynamic:
        """``torch.amp.GradScaler``."""
        return cls(**{**_UNBOUNDED, **changes})

    @classmethod
    def keras(cls, **changes: Any) -> Dynamic:
        """``keras.optimizers.LossScaleOptimizer``."""
        return cls(**{**_UNBOUNDED, "init_scale": 2.0**15, **changes})

    @classmethod
    def apex(cls, **changes: Any) -> Dynamic:
        """NVIDIA's ``apex.amp``."""
        return cls(**{**_UNBOUNDED, "max_scale": 2.0**24, "on_floor": "warn", **changes})

    @classmethod
    def mxnet(cls, **changes: Any) -> Dynamic:
        """MXNet's ``amp``."""
        return cls.apex(**changes)

    @classmethod
    def flax(cls, **changes: Any) -> Dynamic:
        """Flax's ``DynamicScale``, whose window of 2000 is 2001 steps long."""
        return cls(**{**_UNBOUNDED, "growth_interval": 2001, **changes})

    @classmethod
    def jmp(cls, init_scale: float = 2.0**15, **changes: Any) -> Dynamic:
        """``jmp.DynamicLossScale``; its first scale is the user's, 2**15 in its examples."""
        return cls(**{"init_scale": init_scale, "min_scale": 1.0, "on_floor": "hold", **changes})

    @classmethod
    def deepspeed(cls, zero: bool = True, **changes: Any) -> Dynamic:
        """DeepSpeed's fp16 section with its defaults, with ZeRO (any stage) or without it.

        Its optimizers without ZeRO take no notice of ``hysteresis``, and hold the scale at the
        floor where those of ZeRO raise. Its scale first grows ``growth_interval + 1`` clean steps
        after the start and after an overflow, and every ``growth_interval`` from then on.
        """
        section = {"growth_interval": 1000, "growth_delay": 1, "min_scale": 1.0}
        optimizer = {"hysteresis": 2, "on_floor": "raise"} if zero else {"on_floor": "hold"}
        return cls(**{**section, **optimizer, **changes})

    @classmethod
    def megatron(cls, **changes: Any) -> Dynamic:
        """Megatron-LM's ``DynamicGradScaler`` with its default arguments."""
        window = {"growth_interval": 1000, "hysteresis": 2, "min_scale": 1.0}
        return cls(**{**window, "init_scale": 2.0**32, "on_floor": "hold", **changes})

    @classmethod
    def fairseq(cls, data_parallel: int = 1, **changes: Any) -> Dynamic:
        """fairseq's scaler for ``data_parallel`` workers, without its tolerated fraction."""
        window = max(1, 2**14 // _count(data_parallel, "data_parallel"))
        start = {"init_scale": 2.0**7, "growth_interval": window, "min_scale": 1e-4}
        return cls(**{**start, "on_floor": "raise", **changes})

    @classmethod
    def mindspore(cls, **changes: Any) -> Dynamic:
        """MindSpore's ``DynamicLossScaleManager``."""
        return cls(**{"init_scale": 2.0**24, "min_scale": 1.0, "on_floor": "raise", **changes})


@dataclass(frozen=True)
class Predictive:
    """A scale that follows the largest gradient, as high as is safe for float16.

    Every step measures its largest gradient, and the next scale leaves ``headroom`` free above the
    largest one of recent steps. Gradients that shrink raise the scale, gradients that grow lower it
    before they overflow. The scale is always a power of two.

    Args:
        init_scale: the scale of the first step.
        headroom: powers of two to keep free above the largest gradient, 0 to 15.
        min_scale: the scale never falls below this.
        max_scale: the scale never grows above this.
        on_floor: as for ``Dynamic``.

    Examples:
        >>> policy = Predictive()
        >>> state = update(policy, policy.init(), found_inf=False, largest=0.03)
        >>> state.scale
        131072.0
    """

    init_scale: float = 2.0**8
    headroom: int = 3
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**96
    on_floor: str | Callable[[Any], object] = "warn"

    # Torch's numbers, for a scaler of torch's that loads a state of this policy.
    growth_factor = 2.0
    backoff_factor = 0.5
    growth_interval = 2000
    hysteresis = 1
    consecutive_hysteresis = True
    growth_delay = 0

    def __post_init__(self) -> None:
        for name in ("init_scale", "min_scale", "max_scale"):
            value = _store(self, name, _scale_value(getattr(self, name), name))
            check_power_of_two(value, name)
        _check_bounds(self)
        if _count(self.headroom, "headroom", least=0) > LARGEST_EXPONENT:
            raise ValueError(f"headroom must be between 0 and 15, got {self.headroom!r}")

    def init(self) -> ScaleState:
        """Return the state before the first step, in Python numbers."""
        return ScaleState(self.init_scale, 0, 1)

    def resume(self, scale: float) -> ScaleState:
        """Return the state that goes on from a scale alone, as if its gradients just fitted."""
        start = min(max(power_below(scale), self.min_scale), self.max_scale)
        return ScaleState(start, 0, 1, peak_for(self, start, 0.0))


_UNBOUNDED = {"min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE, "on_floor": "hold"}

PRESETS = ("torch", "keras", "apex", "mxnet", "flax", "jmp", "deepspeed", "megatron", "fairseq",
           "mindspore")  # fmt: skip
"""Other systems whose numbers ``Dynamic`` has, by the names of its class methods."""

Policy = Static | Dynamic | Predictive

# What the rule goes by, in the order in which kernels and messages hold it.
RULE_FIELDS = (
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "consecutive_hysteresis",
    "min_scale",
    "max_scale",
    "growth_delay",
)


def numbers(policy: Policy) -> tuple[float, ...]:
    """Return the values of ``RULE_FIELDS``; a ``Predictive`` has one more, its headroom."""
    own = (policy.headroom,) if isinstance(policy, Predictive) else ()
    return (*(getattr(policy, name) for name in RULE_FIELDS), *own)


def ternary(condition: Any, if_true: Any, if_false: Any) -> Any:
    """``where`` for Python numbers."""
    return if_true if condition else if_false


def update(
    policy: Policy,
    state: ScaleState,
    found_inf: Any,
    loss_finite: Any = True,
    largest: Any = UNKNOWN,
    where: Where = ternary,
) -> ScaleState:
    """Return the state after one step, of the same kind as ``state``.

    Args:
        policy: a ``Static``, ``Dynamic`` or ``Predictive``.
        state: the state before the step.
        found_inf: whether the step's gradients held an inf or a NaN, which means that it was
            skipped: a bool, or a 0-d bool array.
        loss_finite: whether the unscaled loss was finite: a bool, or a 0-d bool array. A step
            skipped because of its loss leaves the scale where it is.
        largest: the largest magnitude of the unscaled gradients, a float or a 0-d float32 array;
            negative if it is not known. ``Predictive`` alone uses it, in steps without an overflow.
        where: the framework's select function.
    """
    if isinstance(policy, Predictive):
        return _predict(policy, state, found_inf, loss_finite, largest, where)
    scale, clean, patience, *rest = state

    blame = _blame(found_inf, loss_finite, patience, where)
    left = patience - blame
    # A count that ran out stays at 0: every further overflow backs off until it is refilled.
    left = where(left > 0, left, 0 * left)
    lowered = _at_least(_times(scale, policy.backoff_factor), policy.min_scale, where)
    after_skip = where(blame > left, lowered, scale)

    clean = clean + 1
    grows = clean - policy.growth_delay >= policy.growth_interval
    raised = _at_most(_times(scale, policy.growth_factor), policy.max_scale, scale, where)
    full = 0 * patience + policy.hysteresis

    return ScaleState(
        where(found_inf, after_skip, where(grows, raised, scale)),
        where(found_inf, 0 * clean, where(grows, 0 * clean + policy.growth_delay, clean)),
        where(found_inf, left, full if policy.consecutive_hysteresis else where(grows, full, left)),
        *rest,
    )


def _blame(found_inf: Any, loss_finite: Any, like: Any, where: Where) -> Any:
    """Return 1 if the scale is to blame for a skipped step and 0 if not, as an int of this kind."""
    blame = where(found_inf, 1 + 0 * like, 0 * like)
    return blame if loss_finite is True else where(loss_finite, blame, 0 * blame)


def _predict(
    policy: Predictive,
    state: ScaleState,
    found_inf: Any,
    loss_finite: Any,
    largest: Any,
    where: Where,
) -> ScaleState:
    scale, zeros, clean, peak, gap = state
    overflow = _blame(found_inf, loss_finite, clean, where) > 0
    is_known = where(peak > 0, 1 + 0 * clean, 0 * clean)

    # An overflow that a measured gradient did not announce: something unseen is larger.
    more = gap + where(clean * is_known > 0, 1 + 0 * gap, 0 * gap)
    less = _at_least(gap - GAP_LEAK, 0.0, where)
    new_gap = where(found_inf, where(overflow, _capped(more, LARGEST_GAP, gap, where), gap), less)
    room = _room(policy, new_gap, where)

    lowered = _at_least(power_below(scale, where) * 2.0**-BACKOFF, policy.min_scale, where)
    is_zero = where(largest < 0, 0 * zeros, where(largest < NO_GRADIENT, 1 + 0 * zeros, 0 * zeros))
    # What is not finite in a step without an overflow says nothing.
    usable = where(largest < NO_GRADIENT, 0 * peak, 0 * peak + largest)
    usable = where(largest > LARGEST_SCALE, 0 * peak, usable)
    measured = _largest_of(usable, _times(peak, LEAK), where)
    measured = where(usable > 0, measured, peak)

    run = where(found_inf, zeros, where(largest < 0, zeros, is_zero * (zeros + 1)))
    raises = where(scale < min(FIRST_GUESS, policy.max_scale), run, 0 * run) >= ZEROS
    measured = where(raises, measured * 0.5, measured)
    fitting = peak_for(policy, lowered, new_gap, where)
    new_peak = where(found_inf, where(overflow, fitting, peak), measured)
    chosen = room * inverse_power(where(new_peak > 0, new_peak, 1 + 0 * new_peak), where)
    # Before any gradient was measured, zeros lead straight to the first guess.
    guess = where(is_zero * (1 - is_known) > 0, _at_least(scale, FIRST_GUESS, where), scale)
    guess = _capped(guess, policy.max_scale, scale, where)
    chosen = where(new_peak > 0, chosen, where(found_inf, scale, guess))
    chosen = _capped(_at_least(chosen, policy.min_scale, where), policy.max_scale, scale, where)
    return ScaleState(
        where(found_inf, where(overflow, lowered, scale), chosen),
        where(raises, 0 * run, run),
        where(found_inf, where(overflow, 0 * clean, clean), 1 + 0 * clean),
        new_peak,
        new_gap,
    )


def shifted(policy: Policy, state: ScaleState, exponent: int, where: Where = ternary) -> ScaleState:
    """Return the state with the scale times ``2**exponent``, within the policy's bounds.

    ``Predictive`` continues as if its gradients were as much smaller or larger. If it has measured
    none, it continues as if they just fitted.
    """
    scale = _at_least(state.scale * 2.0**exponent, policy.min_scale, where)
    scale = _capped(scale, policy.max_scale, state.scale, where)
    if not isinstance(policy, Predictive):
        return state._replace(scale=scale)
    moved = state.peak * (state.scale / scale)
    fits = peak_for(policy, scale, state.gap, where)
    return state._replace(scale=scale, peak=where(state.peak > 0, moved, fits))


def peak_for(policy: Predictive, scale: Any, gap: Any, where: Where = ternary) -> Any:
    """Return the largest peak, nearly, for which ``policy`` chooses ``scale``."""
    return FULL * _room(policy, gap, where) * inverse_power(scale, where)


def _room(policy: Predictive, gap: Any, where: Where) -> Any:
    """Return how large the stored peak may become, as a power of two."""
    room = 0 * gap + 2.0 ** (LARGEST_EXPONENT - policy.headroom)
    for power in (8, 4, 2, 1):
        counts = gap >= power
        room = where(counts, room * 2.0**-power, room)
        gap = where(counts, gap - power, gap)
    return room


def inverse_power(value: Any, where: Where = ternary) -> Any:
    """Return 1 / 2**floor(log2(value)) exactly, for ``value`` from 2**-126 to float32's largest.

    Comparisons and products with powers of two are exact in every framework. Logarithms are not.
    """
    if isinstance(value, float):
        return math.ldexp(1.0, 1 - math.frexp(value)[1])
    inverse = 1.0 + 0.0 * value
    for power in (64, 32, 16, 8, 4, 2, 1):
        large, small = value >= 2.0**power, value < 2.0 ** (1 - power)
        factor = where(large, 2.0**-power + 0.0 * value, 1.0 + 0.0 * value)
        factor = where(small, 2.0**power + 0.0 * value, factor)
        value, inverse = value * factor, inverse * factor
    return inverse


def power_below(value: Any, where: Where = ternary) -> Any:
    """Return the largest power of two that does not exceed ``value``."""
    return inverse_power(inverse_power(value, where), where)


def _times(scale: Any, factor: float) -> Any:
    """``scale * factor`` in float32; arrays round by themselves."""
    return float32(scale * factor) if isinstance(scale, float) else scale * factor


def _at_least(scale: Any, floor: float, where: Where) -> Any:
    return where(scale < floor, floor + 0 * scale, scale)


def _capped(value: Any, most: float, like: Any, where: Where) -> Any:
    """Return ``value`` up to ``most``; ``like`` is finite where ``value`` may not be."""
    return where(value > most, most + 0 * like, value)


def _largest_of(value: Any, other: Any, where: Where) -> Any:
    return where(value > other, value, other)


def _at_most(scale: Any, ceiling: float, before: Any, where: Where) -> Any:
    """``scale`` up to ``ceiling``; growth out of float32's range is refused, as torch does."""
    capped = where(scale <= LARGEST_SCALE, ceiling + 0 * before, before)
    return where(scale <= ceiling, scale, capped)


def float32(value: float) -> float:
    """``value`` rounded to float32; what is beyond its range becomes an infinity."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _store(policy: Policy, name: str, value: Any) -> Any:
    object.__setattr__(policy, name, value)
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _scale_value(value: Any, name: str) -> float:
    number = _number(value, name)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ValueError(
            f"{name} must be a positive number from 2**-126 to float32's largest, got {value!r}; "
            "outside that range the scale or its inverse is 0 or inf"
        )
    return float32(number)


def _check_bounds(policy: Dynamic | Predictive) -> None:
    low, start, high = policy.min_scale, policy.init_scale, policy.max_scale
    if low > high:
        raise ValueError(f"min_scale must not exceed max_scale, got {low!r} > {high!r}")
    if not low <= start <= high:
        raise ValueError(
            f"init_scale must lie between min_scale and max_scale, got {start!r} with "
            f"min_scale={low!r} and max_scale={high!r}"
        )
    if not (callable(policy.on_floor) or policy.on_floor in ON_FLOOR):
        raise ValueError(
            f"on_floor must be one of {', '.join(map(repr, ON_FLOOR))} or a callable, "
            f"got {policy.on_floor!r}"
        )


def _count(value: Any, name: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if not least <= value < 2**31:
        raise ValueError(f"{name} must be between {least} and 2**31 - 1, got {value!r}")
    return value


def check_steps(value: Any, name: str) -> None:
    """Refuses what is no number of steps."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of steps above 0, got {value!r}")


def check_power_of_two(value: Any, name: str) -> None:
    """Refuses what is no power of two."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or math.frexp(value)[0] != 0.5:
        raise ValueError(f"{name} must be a power of two, got {value!r}")
