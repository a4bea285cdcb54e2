"""Gluon's mixed-precision calls with gradlift's policies, for MXNet 1.9.1, which is retired.

``init``, ``init_trainer``, ``scale_loss`` and ``unscale`` are used as those of
``mxnet.contrib.amp``. MXNet casts and skips by itself; its loss scaler is replaced by one that
follows a policy. Two things are mended on the way: a lower scale is used from the very next step
(MXNet's own comes one step late, so that every overflow costs two), and a float16 loss is brought
to float32 before it is scaled.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from gradlift.floor import AT_FLOOR, act
from gradlift.policy import LARGEST_EXPONENT, Dynamic, Policy, Predictive, ScaleState, update
from gradlift.troubleshooting import warn

try:
    mx: Any = importlib.import_module("mxnet")
    np: Any = importlib.import_module("numpy")
    contrib: Any = importlib.import_module("mxnet.contrib.amp.amp")
except ImportError as error:
    raise ImportError(
        "gradlift.mxnet needs MXNet: pip install mxnet==1.9.1 numpy==1.23.5, on Python 3.10 or 3.11"
    ) from error

CHUNK = 200  # arrays that one call of multi_all_finite takes


class LossScaler:
    """What a Trainer asks for its loss scale; ``trainer._amp_loss_scaler``."""

    def __init__(self) -> None:
        self.skipped_steps = 0
        self._losses: list[Any] = []
        self._peaks: list[Any] | None = None
        self._has_half_loss = False
        self._warned: set[str] = set()
        self.follow(Dynamic.mxnet())

    def follow(self, policy: Policy) -> None:
        self.policy = policy
        self.state: ScaleState = policy.init()

    @property
    def loss_scale(self) -> float:
        return self.state.scale

    def scaled(self, loss: Any) -> Any:
        """``loss`` (any shape and dtype) in float32, times the scale."""
        self._losses.append(loss.detach())
        self._peaks = None
        self._has_half_loss |= loss.dtype == np.float16
        return loss.astype("float32") * self.loss_scale

    def has_overflow(self, params: Any) -> bool:
        """Called by the Trainer with its parameters in every step; True makes it skip."""
        self.measure(params)
        grads = _grads(params)
        losses, self._losses = self._losses, []
        found_inf = not _finite(grads)
        # The losses are looked at only then: waiting for them costs nothing more.
        loss_finite = not found_inf or _finite(losses)
        if found_inf:
            self.skipped_steps += 1
            self._react(loss_finite)
        largest = max((peak.asscalar().item() for peak in self._peaks or ()), default=0.0)
        largest, self._peaks = largest / self.loss_scale, None
        state = update(self.policy, self.state, found_inf, loss_finite, largest)
        if self._has_half_loss and isinstance(self.policy, Predictive):
            # The gradient of such a loss is the scale, in float16.
            state = state._replace(scale=min(state.scale, 2.0**LARGEST_EXPONENT))
        self.state = state
        return found_inf

    def measure(self, params: Any) -> None:
        """Take the largest scaled gradient of this step, unless it was taken before.

        ``unscale`` calls it first, so that users cannot clip the gradients before. It does not
        synchronize with the device.
        """
        if self._peaks is None and isinstance(self.policy, Predictive):
            self._peaks = [_largest(same) for same in _alike(_grads(params))]

    def _react(self, loss_finite: bool) -> None:
        if not loss_finite:
            self._warn(
                "gradlift: the loss is inf or NaN before it is scaled: no loss scale can help",
                "the-loss-is-inf-or-nan",
            )
        elif self.loss_scale <= self.policy.min_scale:
            floor = self.policy.min_scale
            text = f"gradlift: a step overflowed with the scale at its floor, {floor:g}"
            say = partial(self._warn, anchor=AT_FLOOR)
            act(self.policy.on_floor, lambda: text, self, say)

    def _warn(self, text: str, anchor: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn(text, anchor)


def _grads(params: Any) -> list[Any]:
    """Return the gradients of all parameters on all devices."""
    return [grad for p in params if p._grad is not None for grad in p.list_grad()]


def _alike(arrays: list[Any]) -> list[list[Any]]:
    """Return the arrays of each device and dtype, in lists that one call of an operator takes."""
    alike: dict[Any, list[Any]] = {}
    for array in arrays:
        alike.setdefault((array.context, array.dtype), []).append(array)
    return [same[i : i + CHUNK] for same in alike.values() for i in range(0, len(same), CHUNK)]


def _finite(arrays: list[Any]) -> bool:
    """Return whether no array has an inf or a NaN; synchronizes with the device."""
    with mx.autograd.pause():
        return all(
            mx.nd.multi_all_finite(*same, num_arrays=len(same)).asscalar()
            for same in _alike(arrays)
        )


def _largest(arrays: list[Any]) -> Any:
    """Return the largest magnitude of arrays on one device, float32, with one element."""
    with mx.autograd.pause():
        peaks = [mx.nd.max(mx.nd.abs(array)).astype("float32") for array in arrays]
        return mx.nd.max(mx.nd.concat(*peaks, dim=0))


def init(target_dtype: Any = "float16", **op_lists: Any) -> None:
    """Have MXNet cast from now on; call it before the model is made.

    Args:
        target_dtype: ``"float16"`` or ``"bfloat16"``.
        **op_lists: ``target_precision_ops``, ``conditional_fp32_ops``, ``fp32_ops``, as for
            ``mxnet.contrib.amp.init``.
    """
    if contrib._amp_initialized and not isinstance(contrib._loss_scaler, LossScaler):
        raise RuntimeError(
            "mxnet.contrib.amp.init() ran before; call gradlift.mxnet.init() in its place"
        )
    # MXNet ties its loss functions to the scaler that init makes, so it must be one of these.
    contrib.LossScaler = LossScaler
    contrib.init(target_dtype, **op_lists)


def init_trainer(trainer: Any, policy: Policy | None = None) -> None:
    """Give a Gluon Trainer a loss scale.

    Args:
        trainer: a ``gluon.Trainer`` with ``update_on_kvstore`` not True.
        policy: a ``Static``, ``Dynamic`` or ``Predictive``; ``Dynamic.mxnet()`` if None.
    """
    if not isinstance(trainer, mx.gluon.Trainer):
        raise TypeError(f"init_trainer needs a gluon.Trainer, got {type(trainer).__name__}")
    if not isinstance(contrib._loss_scaler, LossScaler):
        raise RuntimeError("gradlift.mxnet.init() must come before init_trainer()")
    if trainer._kvstore_params["update_on_kvstore"]:
        raise ValueError(
            "a Trainer with update_on_kvstore=True cannot skip a step; make it with "
            "update_on_kvstore=False"
        )
    if not trainer._contains_sparse_weight:
        trainer._kvstore_params["update_on_kvstore"] = False
    contrib.init_trainer(trainer)
    if policy is not None:
        trainer._amp_loss_scaler.follow(policy)


@contextlib.contextmanager
def scale_loss(loss: Any, trainer: Any) -> Iterator[Any]:
    """Yields the scaled loss, or a list of them for a list; call it inside ``record()``."""
    scaler = _scaler(trainer)
    trainer._scale = trainer._amp_original_scale / scaler.loss_scale
    if isinstance(loss, (list, tuple)):
        yield [scaler.scaled(each) for each in loss]
    else:
        yield scaler.scaled(loss)


def unscale(trainer: Any) -> None:
    """Divide the gradients by the scale now, to look at them or clip them before ``step``."""
    _scaler(trainer).measure(trainer.optimizer.param_dict.values())
    contrib.unscale(trainer)


def _scaler(trainer: Any) -> LossScaler:
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    if not isinstance(scaler, LossScaler):
        raise RuntimeError("this Trainer has no loss scale; call gradlift.mxnet.init_trainer on it")
    return scaler
