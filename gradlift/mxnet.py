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
from gradlift.policy import Dynamic, Policy, ScaleState, update
from gradlift.troubleshooting import warn

try:
    mx: Any = importlib.import_module("mxnet")
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
        return loss.astype("float32") * self.loss_scale

    def has_overflow(self, params: Any) -> bool:
        """Called by the Trainer with its parameters in every step; True makes it skip."""
        grads = [grad for p in params if p._grad is not None for grad in p.list_grad()]
        losses, self._losses = self._losses, []
        found_inf = not _finite(grads)
        # The losses are looked at only then: waiting for them costs nothing more.
        loss_finite = not found_inf or _finite(losses)
        if found_inf:
            self.skipped_steps += 1
            self._react(loss_finite)
        self.state = update(self.policy, self.state, found_inf, loss_finite=loss_finite)
        return found_inf

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
            warn(text, anchor, stacklevel=5)


def _finite(arrays: list[Any]) -> bool:
    """Whether no array holds an inf or a NaN; waits for the device."""
    by_context: dict[Any, list[Any]] = {}
    for array in arrays:
        by_context.setdefault(array.context, []).append(array)
    with mx.autograd.pause():
        return all(
            mx.nd.multi_all_finite(*chunk, num_arrays=len(chunk)).asscalar()
            for same in by_context.values()
            for chunk in (same[i : i + CHUNK] for i in range(0, len(same), CHUNK))
        )


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
        policy: a ``Static`` or ``Dynamic``; ``Dynamic.mxnet()`` where None.
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
    _scaler(trainer)
    contrib.unscale(trainer)


def _scaler(trainer: Any) -> LossScaler:
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    if not isinstance(scaler, LossScaler):
        raise RuntimeError("this Trainer has no loss scale; call gradlift.mxnet.init_trainer on it")
    return scaler
