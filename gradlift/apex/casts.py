"""What O1 casts: Apex's lists of functions, over ``torch.autocast``.

Apex replaced functions in torch's namespaces by ones that cast their arguments first. Here
``torch.autocast`` does what it does alike (the matrix products, in every function built on them),
and the functions that it treats otherwise, or only on a GPU, are replaced as Apex did it, so that
one list holds on every device. Both stay on until the next ``initialize``: code outside a model's
forward, such as a loss, is cast too.

autocast's cache of cast weights is off meanwhile. It lives as long as autocast does, here for the
whole run, and would hand out weights from before the last step, or ones cast under ``no_grad``
that pass no gradient back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

Function = Callable[..., Any]

FUNCTIONAL = torch.nn.functional
RECURRENT: Any = torch.nn.modules.rnn._VF

# float16, by a replaced function: autocast does these on CUDA, and not (or wrongly) on the CPU.
HALF_ON_CPU = {
    torch: ("addmv", "addr", "mv"),
    Tensor: ("addmv", "addr", "mv"),
    RECURRENT: (
        *("lstm", "gru", "rnn_tanh", "rnn_relu"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    ),
}

_MATH = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2"),
    *("reciprocal", "rsqrt", "sinh", "tan", "pow"),
    *("cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm"),
)

# float32, by a replaced function.
FLOAT = {
    FUNCTIONAL: (
        *("interpolate", "grid_sample", "softplus", "softmin", "log_softmax", "softmax", "gelu"),
        *("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity"),
        *("poisson_nll_loss", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss"),
        *("kl_div", "l1_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss"),
        *("multilabel_soft_margin_loss", "multi_margin_loss", "nll_loss"),
        *("binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss"),
        *("triplet_margin_loss", "ctc_loss"),
    ),
    torch: _MATH,
    # Apex also brings what goes to the host to float32.
    Tensor: (*_MATH, "__pow__", "__rpow__", "__ipow__", "cpu"),
}

# float32 where float16 and float32 meet. Arithmetic, comparisons, cat and stack do so anyway.
PROMOTE = {
    FUNCTIONAL: ("bilinear",),
    torch: ("bilinear", "cross", "dot", "equal"),
    Tensor: ("cross", "dot", "equal"),
}

# Refused on float16: a result in float32 does not fit into the tensor it would be written to.
IN_PLACE = {
    owner: tuple(f"{name}_" for name in _MATH if hasattr(owner, f"{name}_"))
    for owner in (torch, Tensor)
}

BANNED = "binary_cross_entropy"
BANNED_ADVICE = (
    "binary_cross_entropy (BCELoss) is not safe on float16 probabilities: use "
    "binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the values before the sigmoid, or "
    "call amp.register_float_function(torch, 'sigmoid') before amp.initialize"
)


class _Replaced(NamedTuple):
    owner: Any
    name: str
    original: Function
    own: bool  # whether the owner's own namespace held it, and not a base class's


class _State:
    """What is replaced; one for the process, since torch's namespaces are."""

    def __init__(self) -> None:
        self.active = False
        self.devices: frozenset[str] = frozenset()
        self.dtypes: dict[str, torch.dtype] = {}
        """What autocast's dtype was on these devices."""
        self.replaced: list[_Replaced] = []
        self.registered: dict[tuple[Any, str], Callable[[Function], Function]] = {}


_state = _State()


# On and off.


def turn_on(devices: Iterable[str]) -> None:
    """Cast on these types of device from now on."""
    turn_off()
    _state.devices = frozenset(devices)
    _state.active = True
    torch.set_autocast_cache_enabled(False)
    _state.dtypes = {device: torch.get_autocast_dtype(device) for device in _state.devices}
    for device in _state.devices:
        torch.set_autocast_dtype(device, torch.float16)
        torch.set_autocast_enabled(device, True)
    # What the user registered comes first: it holds where a list below names the same function.
    for (owner, name), wrap in _state.registered.items():
        _replace(owner, name, wrap)
    tables = (_half_on_cpu, HALF_ON_CPU), (float_function, FLOAT), (promote_function, PROMOTE)
    for wrap, table in (*tables, (_refused_in_place, IN_PLACE)):
        for owner, names in table.items():
            for name in names:
                _replace(owner, name, wrap)
    _replace(FUNCTIONAL, BANNED, _banned)
    for name in ("backward", "grad"):
        _replace(torch.autograd, name, _without_autocast)


def turn_off() -> None:
    """Put every function back."""
    if not _state.replaced:
        return
    for owner, name, original, own in reversed(_state.replaced):
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
    _state.replaced.clear()
    _state.active = False
    for device, dtype in _state.dtypes.items():
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(True)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Nothing is cast inside, as if O1 were off."""
    before, _state.active = _state.active, False
    try:
        with _autocast_paused():
            yield
    finally:
        _state.active = before


@contextlib.contextmanager
def _autocast_paused() -> Iterator[None]:
    on = [device for device in _state.devices if torch.is_autocast_enabled(device)]
    for device in on:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)


def _replace(owner: Any, name: str, wrap: Callable[[Function], Function]) -> None:
    if any(done.owner is owner and done.name == name for done in _state.replaced):
        return
    original = getattr(owner, name)
    _state.replaced.append(_Replaced(owner, name, original, name in vars(owner)))
    setattr(owner, name, wrap(original))


# The replacements.


def _castable(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype in (torch.float16, torch.float32)
        and value.device.type in _state.devices
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its float16 and float32 tensors in ``dtype``; lists and tuples keep their
    type, anything else is returned as it is."""
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if _castable(value) else value


def _dtypes(values: Iterable[Any]) -> set[torch.dtype]:
    found: set[torch.dtype] = set()
    for value in values:
        if type(value) in (list, tuple):
            found |= _dtypes(value)
        elif _castable(value):
            found.add(value.dtype)
    return found


def _casting(function: Function, choose: Callable[[tuple], torch.dtype | None]) -> Function:
    """``function`` with arguments cast to what ``choose`` makes of them; None casts nothing."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((*args, *kwargs.values())) if _state.active else None
        if dtype is None or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
        return function(*(_cast(value, dtype) for value in args), **kwargs)

    return wrapper


def _half_on_cpu(function: Function) -> Function:
    def choose(values: tuple) -> torch.dtype | None:
        on_cpu = any(isinstance(v, Tensor) and v.device.type == "cpu" for v in values)
        return torch.float16 if on_cpu else None

    return _casting(function, choose)


def _banned(function: Function) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _state.active and torch.float16 in _dtypes((*args, *kwargs.values())):
            raise NotImplementedError(BANNED_ADVICE)
        with _autocast_paused():  # on CUDA it refuses float32 as well
            return function(*args, **kwargs)

    return wrapper


def _refused_in_place(function: Function) -> Function:
    name = function.__name__

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _state.active and torch.float16 in _dtypes((*args[:1], *kwargs.values())):
            raise NotImplementedError(
                f"{name}() on a float16 tensor is not safe: under O1 {name[:-1]} runs in float32, "
                f"which does not fit in place. Use {name[:-1]}() and take its result"
            )
        return function(*args, **kwargs)

    return wrapper


def _without_autocast(function: Function) -> Function:
    """For backward: a gradient takes the dtype of its forward op, whatever autocast would do."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _autocast_paused():
            return function(*args, **kwargs)

    return wrapper


# The users' own functions.


def half_function(fn: Function) -> Function:
    """A decorator: under O1, ``fn`` gets its floating arguments as float16."""
    return _casting(fn, lambda values: torch.float16)


def float_function(fn: Function) -> Function:
    """A decorator: under O1, ``fn`` gets its floating arguments as float32."""
    return _casting(fn, lambda v: torch.float32 if torch.float16 in _dtypes(v) else None)


def promote_function(fn: Function) -> Function:
    """A decorator: under O1, ``fn`` gets float32 where float16 and float32 are mixed."""
    return _casting(fn, lambda v: torch.float32 if len(_dtypes(v)) > 1 else None)


def register_half_function(module: Any, name: str) -> None:
    """As ``half_function``, for the function called ``name`` in ``module``."""
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """As ``float_function``, for the function called ``name`` in ``module``."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """As ``promote_function``, for the function called ``name`` in ``module``."""
    _register(module, name, promote_function)


def _register(module: Any, name: str, wrap: Callable[[Function], Function]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"{module!r} has no function named {name!r}")
    _state.registered[module, name] = wrap
    if _state.replaced:
        turn_on(_state.devices)
