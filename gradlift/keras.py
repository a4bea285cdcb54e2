"""Keras: ``LossScaleOptimizer`` with gradlift's rule, on TensorFlow, JAX and torch.

A subclass of Keras's own, since ``compile`` silently wraps anything else under
``mixed_float16``. Keras writes the rule twice, with state and without; here it is called once,
in ``_advance``, and only the inner optimizer's step is conditional. What Keras's gets wrong and
this one does not: the scale falls to 0; replicas are taken to agree on a skip when only the
first was asked; a half-precision loss scaled before the optimizer is built overflows; and
``apply`` outside a stateless scope leaks tracers on the JAX backend.

Example::

    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), policy=Dynamic(hysteresis=2))
    model.compile(optimizer, loss)
    model.fit(x, y, callbacks=[LossScaleLogger()])

A loss that is itself infinite counts as an overflow: ``apply`` is not shown the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

try:
    import keras
except ImportError as error:
    raise ImportError(
        "gradlift.keras needs keras and one of its backends, which are not installed: "
        "pip install 'gradlift[keras]'"
    ) from error

from gradlift import policy as rule
from gradlift.floor import react
from gradlift.policy import Dynamic, Policy, ScaleState, Static

# Keras has no types; what its decorators let a checker infer is wrong.
ops: Any = keras.ops

_KERAS = keras.optimizers.LossScaleOptimizer
_POLICIES = {"Static": Static, "Dynamic": Dynamic}


@keras.saving.register_keras_serializable(package="gradlift")
class LossScaleOptimizer(_KERAS):
    """Keras's ``LossScaleOptimizer`` with any gradlift policy.

    Args:
        inner_optimizer: the Keras optimizer to wrap.
        initial_scale: the scale of the first step, 2**15 when left out.
        dynamic_growth_steps: clean steps before the scale doubles, 2000 when left out.
        name: as in Keras.
        policy: a ``Static`` or a ``Dynamic`` instead of the two numbers.
        dynamic: False, as in Keras 2, for a scale that stays at ``initial_scale``.
        **kwargs: as in Keras, which accepts only its own defaults here.

    Attributes:
        dynamic_scale: float32 variable, the scale.
        step_counter: int variable, clean steps since the scale changed or a step was skipped.
        hysteresis_tracker: int32 variable, overflows that may still pass before it backs off.
        skipped_steps: int32 variable, steps skipped so far.
        last_finite: bool variable, whether the latest step was taken.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
        *,
        policy: Policy | None = None,
        dynamic: bool = True,
        **kwargs: Any,
    ) -> None:
        if policy is None:
            policy = _policy(initial_scale, dynamic_growth_steps, dynamic)
        elif initial_scale is not None or dynamic_growth_steps is not None or not dynamic:
            raise ValueError(
                f"policy={policy!r} says everything about the scale; leave out initial_scale, "
                "dynamic_growth_steps and dynamic"
            )
        super().__init__(
            inner_optimizer, policy.init_scale, policy.growth_interval, name=name, **kwargs
        )
        self.policy = policy
        self._gradients_are_true = False

    def build(self, var_list: Sequence[Any]) -> None:
        """Create the variables."""
        super().build(var_list)
        # After Keras's own, so that a file saved with Keras's class can be loaded.
        patience = keras.initializers.Constant(self.policy.hysteresis)
        self.hysteresis_tracker = self._add_scalar("hysteresis_tracker", "int32", patience)
        self.skipped_steps = self._add_scalar("skipped_steps", "int32", "zeros")
        self.last_finite = self._add_scalar("last_finite", "bool", "ones")

    def _add_scalar(self, name: str, dtype: str, initializer: Any) -> Any:
        return self.add_variable((), initializer, dtype, aggregation="none", name=name)

    def scale_loss(self, loss: Any) -> Any:
        """``loss`` times the scale; a half-precision loss is cast to float32 first."""
        if keras.backend.standardize_dtype(loss.dtype) in ("float16", "bfloat16"):
            loss = ops.cast(loss, "float32")
        return super().scale_loss(loss)

    def get_scaled_loss(self, loss: Any) -> Any:
        """Keras 2's name for ``scale_loss``."""
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """The true gradients, as in Keras 2: to look at, to clip, and to give to ``apply``.

        The next ``apply`` or ``apply_gradients`` takes its gradients as true ones.
        """
        self._gradients_are_true = True
        return self._unscaled(grads)

    def _unscaled(self, grads: Iterable[Any], variables: Sequence[Any] = ()) -> list[Any]:
        scale = self.dynamic_scale if self.built else self.initial_scale
        # Variables of float8 training take their new value in place of a gradient.
        kept = [self._overwrite_variable_with_gradient(v) for v in variables]
        return [
            g if g is None or keep else ops.divide(g, scale)
            for g, keep in zip_longest(grads, kept, fillvalue=False)
        ]

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Unscale, step if every gradient is finite, update the scale."""
        grads = list(grads)
        if not self.built:
            with keras.name_scope(self.name):
                self.build(list(trainable_variables or ()))
            self.built = True
        variables = list(trainable_variables or self._trainable_variables)
        true, self._gradients_are_true = self._gradients_are_true, False
        # Before the check: with a scale below 1 the true gradient can be too large for float32.
        grads = grads if true else self._unscaled(grads, variables)
        if keras.backend.backend() == "tensorflow":
            self._apply_on_replicas(grads, variables)
        else:
            self._apply(self.check_finite(grads), grads, variables)

    def stateless_apply(
        self, optimizer_variables: list[Any], grads: list[Any], trainable_variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """``apply`` on values instead of variables; returns the new values."""
        # Keras's base class calls apply() in a stateless scope, which is all it takes.
        return super(_KERAS, self).stateless_apply(optimizer_variables, grads, trainable_variables)

    def _apply(self, finite: Any, grads: list[Any], variables: list[Any]) -> None:
        def step() -> None:
            self.inner_optimizer.apply(grads, variables)

        if keras.backend.backend() == "jax":
            self._step_if(finite, step)
        else:
            ops.cond(finite, step, lambda: None)
        self._advance(finite)

    def _step_if(self, finite: Any, step: Callable[[], None]) -> None:
        """``ops.cond`` for JAX, where both branches return all the state there is."""
        from jax.core import Tracer

        if not isinstance(finite, Tracer):  # a cond would compile anew at every step
            return step() if finite else None

        everything = [*self._trainable_variables, *self.variables]
        before = [v.value for v in everything]

        def after() -> list[Any]:
            mapping = list(zip(everything, before, strict=True))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                step()
            return [scope.get_current_value(v) for v in everything]

        chosen = ops.cond(finite, after, lambda: before)
        for variable, value in zip(everything, chosen, strict=True):
            variable.assign(value)
        return None

    def _apply_on_replicas(self, grads: list[Any], variables: list[Any]) -> None:
        """TensorFlow: every replica steps, or none does."""
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        if context is None:
            raise ValueError(
                "apply() was called in a cross-replica context; call it inside strategy.run()"
            )
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            bad = self._bad(grads)
            if context.num_replicas_in_sync > 1:
                bad = context.all_reduce(tf.distribute.ReduceOp.SUM, bad)
            self._apply(tf.equal(bad, 0), grads, variables)
            return

        def merged(strategy: Any, grads: list[Any], variables: list[Any]) -> None:
            each = strategy.extended.call_for_each_replica
            bad = strategy.reduce(tf.distribute.ReduceOp.SUM, each(self._bad, (grads,)), axis=None)
            finite = tf.equal(bad, 0)
            apply = self.inner_optimizer.apply
            # Here and not in a replica: a branch of a cond there may not merge replicas, and
            # the inner optimizer does.
            ops.cond(finite, lambda: each(apply, (grads, variables)), lambda: None)
            self._advance(finite)

        context.merge_call(merged, args=(grads, variables))

    def _bad(self, grads: list[Any]) -> Any:
        """1 where a gradient is not finite, 0 where all are: int32, 0-d."""
        return ops.cast(ops.logical_not(self.check_finite(grads)), "int32")

    def _advance(self, finite: Any) -> None:
        """One step of the rule, and its counters."""
        variables = (self.dynamic_scale, self.step_counter, self.hysteresis_tracker)
        before = ScaleState(*(ops.convert_to_tensor(v) for v in variables))
        skipped = ops.logical_not(finite)
        after = rule.update(self.policy, before, skipped, where=ops.where)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)
        self.skipped_steps.assign(
            ops.add(ops.convert_to_tensor(self.skipped_steps), ops.cast(skipped, "int32"))
        )
        self.last_finite.assign(finite)

    def load_own_variables(self, store: Any) -> None:
        """Load the variables, also from a file saved with Keras's own class."""
        own = len(self._variables)
        new = (self.hysteresis_tracker, self.skipped_steps, self.last_finite) if self.built else ()
        if new and len(store.keys()) == len(self.variables) - len(new):
            saved = [store[str(i)] for i in range(len(store.keys()))]
            saved[own - len(new) : own - len(new)] = [v.numpy() for v in new]
            store = {str(i): value for i, value in enumerate(saved)}
        super().load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """The name, the inner optimizer and the policy."""
        config = super().get_config()
        del config["initial_scale"], config["dynamic_growth_steps"]
        fields = asdict(self.policy)
        if callable(fields.get("on_floor")):
            fields["on_floor"] = keras.saving.serialize_keras_object(fields["on_floor"])
        return {**config, "policy": {"kind": type(self.policy).__name__, **fields}}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """From a config of this class or of Keras's."""
        config = dict(config)
        if "policy" in config:
            fields = dict(config["policy"])
            if isinstance(fields.get("on_floor"), dict):
                fields["on_floor"] = keras.saving.deserialize_keras_object(
                    fields["on_floor"], custom_objects=custom_objects
                )
            config["policy"] = _POLICIES[fields.pop("kind")](**fields)
        return super().from_config(config, custom_objects)


def _policy(initial_scale: float | None, growth_steps: int | None, dynamic: bool) -> Policy:
    scale = 2.0**15 if initial_scale is None else initial_scale
    if not dynamic:
        return Static(scale)
    steps = {} if growth_steps is None else {"growth_interval": growth_steps}
    return Dynamic.keras(init_scale=scale, **steps)


def from_keras(
    optimizer: keras.optimizers.LossScaleOptimizer, policy: Policy | None = None
) -> LossScaleOptimizer:
    """Go on from Keras's own ``LossScaleOptimizer``, for instance one that a file held.

    ``model.optimizer = from_keras(model.optimizer)`` after ``load_model``.

    Args:
        optimizer: Keras's; its inner optimizer is taken over, not copied.
        policy: the rule from now on; Keras's own numbers when left out.
    """
    scale, steps = optimizer.initial_scale, optimizer.dynamic_growth_steps
    policy = Dynamic.keras(init_scale=scale, growth_interval=steps) if policy is None else policy
    ours = LossScaleOptimizer(optimizer.inner_optimizer, policy=policy, name=optimizer.name)
    if optimizer.built:
        ours.build(optimizer._trainable_variables)
        ours.dynamic_scale.assign(optimizer.dynamic_scale)
        ours.step_counter.assign(optimizer.step_counter)
    return ours


class LossScaleLogger(keras.callbacks.Callback):
    """Adds ``loss_scale`` and ``skipped_steps`` to the logs of every epoch.

    It also does what the policy's ``on_floor`` asks, once an epoch.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras."""
        model: Any = self.model
        optimizer = model.optimizer
        if not isinstance(optimizer, LossScaleOptimizer):
            raise ValueError(
                "LossScaleLogger needs a model compiled with gradlift.keras.LossScaleOptimizer, "
                f"got {type(optimizer).__name__}"
            )
        scale = _number(optimizer.dynamic_scale)
        if logs is not None:
            logs["loss_scale"] = scale
            logs["skipped_steps"] = _number(optimizer.skipped_steps)
        react(optimizer.policy, scale, _number(optimizer.last_finite), optimizer)


def _number(variable: Any) -> Any:
    return ops.convert_to_numpy(ops.convert_to_tensor(variable)).item()
