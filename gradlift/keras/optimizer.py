"""``LossScaleOptimizer``: Keras's own, with any policy.

A subclass, since ``compile`` silently wraps anything else under ``mixed_float16``. Keras writes
the rule twice, with state and without; here it is called once, in ``_advance``, and only the
inner optimizer's step is conditional. What Keras's gets wrong and this one does not: the scale
falls to 0; replicas are taken to agree on a skip when only the first was asked; a half-precision
loss scaled before the optimizer is built overflows; and ``apply`` outside a stateless scope leaks
tracers on the JAX backend.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import keras

from gradlift.keras import saved
from gradlift.keras.found import Found, from_table, largest_of, to_table
from gradlift.keras.pending import Pending
from gradlift.policy import (
    LARGEST_EXPONENT,
    Dynamic,
    Policy,
    Predictive,
    ScaleState,
    Static,
    update,
)
from gradlift.troubleshooting import warn

# Keras has no types; what its decorators let a checker infer is wrong.
ops: Any = keras.ops

_KERAS = keras.optimizers.LossScaleOptimizer
# Files of older versions have "Adaptive", with the same fields.
_LOAD_THE_REST = (
    "the optimizer was not changed: load_weights(path, skip_mismatch=True) loads the rest of the "
    "file, and the scale stays as it is"
)
_SET_IT = "set it first, for instance optimizer.dynamic_scale.assign(2.0**15)"
_POLICIES = {"Static": Static, "Dynamic": Dynamic, "Predictive": Predictive, "Adaptive": Predictive}


@keras.saving.register_keras_serializable(package="gradlift")
class LossScaleOptimizer(_KERAS):
    """Keras's ``LossScaleOptimizer`` with any gradlift policy.

    Args:
        inner_optimizer: the Keras optimizer to wrap.
        initial_scale: the scale of the first step, 2**15 when left out.
        dynamic_growth_steps: clean steps before the scale doubles, 2000 when left out.
        name: as in Keras.
        policy: a ``Static``, ``Dynamic`` or ``Predictive`` instead of the two numbers.
        dynamic: False, as in Keras 2, for a scale that stays at ``initial_scale``.
        **kwargs: as in Keras, which accepts only its own defaults here.

    Attributes:
        dynamic_scale: float32 variable, the scale.
        step_counter: int variable, clean steps since the scale grew or a step was skipped;
            ``Predictive``: steps in a row with nothing but zeros.
        hysteresis_tracker: int32 variable, overflows that may still pass before it backs off;
            ``Predictive``: 0 after an overflow, 1 after a clean step.
        skipped_steps: int32 variable, steps skipped so far.
        last_finite: bool variable, whether the latest step was taken.
        peak, gap: float32 variables, only with ``Predictive``; see ``policy.ScaleState``.
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
        _check_inner(inner_optimizer)
        if policy is None:
            policy = _policy(initial_scale, dynamic_growth_steps, dynamic)
        elif not isinstance(policy, Policy):
            raise ValueError(
                "policy must be a Static, a Dynamic or a Predictive, for instance "
                f"gradlift.Dynamic(hysteresis=2), got {policy!r}"
            )
        elif initial_scale is not None or dynamic_growth_steps is not None or not dynamic:
            raise ValueError(
                f"policy={policy!r} says everything about the scale; leave out initial_scale, "
                "dynamic_growth_steps and dynamic"
            )
        super().__init__(
            inner_optimizer, policy.init_scale, policy.growth_interval, name=name, **kwargs
        )
        self.policy, self._pending, self._has_half_loss = policy, Pending(), False

    def build(self, var_list: Sequence[Any]) -> None:
        """Create the variables; does nothing the second time, as Keras's other optimizers do."""
        if self.built:
            return
        self.step_counter = self._add("step_counter", "int", "zeros")
        start = keras.initializers.Constant(self.initial_scale)
        self.dynamic_scale = self._add("dynamic_scale", "float32", start)
        # Keras's class builds it in any case: one that does not refuse would lose its state.
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        super(_KERAS, self).build(var_list)
        # After Keras's own, so that a file saved with Keras's class can be loaded.
        patience = keras.initializers.Constant(self.policy.hysteresis)
        self.hysteresis_tracker = self._add("hysteresis_tracker", "int32", patience)
        self.skipped_steps = self._add("skipped_steps", "int32", "zeros")
        self.last_finite = self._add("last_finite", "bool", "ones")
        if isinstance(self.policy, Predictive):
            self.peak = self._add("peak", "float32", "zeros")
            self.gap = self._add("gap", "float32", "zeros")

    @property
    def _predicted(self) -> list[Any]:
        """The variables that only a ``Predictive`` policy has."""
        return [self.peak, self.gap] if isinstance(self.policy, Predictive) else []

    @property
    def _state(self) -> list[Any]:
        """The variables that the rule reads and writes, in the order of ``ScaleState``."""
        return [self.dynamic_scale, self.step_counter, self.hysteresis_tracker, *self._predicted]

    def _assign(self, state: ScaleState) -> None:
        """Write ``state`` into the variables."""
        for variable, value in zip(self._state, state, strict=False):
            variable.assign(value)

    def _restore(self, found: saved.Saved) -> None:
        """Go on from what was saved."""
        self._assign(found.state)
        self.skipped_steps.assign(found.skipped_steps)
        self.last_finite.assign(found.last_finite)

    def _add(self, name: str, dtype: str, initializer: Any) -> Any:
        return self.add_variable((), initializer, dtype, aggregation="none", name=name)

    def scale_loss(self, loss: Any) -> Any:
        """``loss`` times the scale; a half-precision loss is cast to float32 first."""
        dtype = keras.backend.standardize_dtype(getattr(loss, "dtype", "float32"))
        if dtype in ("float16", "bfloat16"):
            self._has_half_loss |= dtype == "float16"
            loss = ops.cast(loss, "float32")
        return self._pending.scales(loss, super().scale_loss(loss), self._holds_gradients)

    def _holds_gradients(self) -> bool:
        """Whether torch has gathered gradients in the variables and not cleared them since."""
        return any(v.value.grad is not None for v in self._trainable_variables)

    @property
    def has_scaled_a_loss(self) -> bool:
        """Whether ``scale_loss`` was ever called, by a step or while one was traced."""
        return self._pending.scaled_any

    def get_scaled_loss(self, loss: Any) -> Any:
        """Keras 2's name for ``scale_loss``."""
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """The true gradients, as in Keras 2: to look at, and to give to ``apply``.

        ``apply`` knows these very tensors again, and inside ``tf.function`` also what was made
        from them. Elsewhere say ``apply(..., unscaled=True)`` of gradients that were clipped.
        """
        grads = list(grads)
        true = self._unscaled(grads)
        self._pending.unscaled(grads, true, self._largest(true))
        return true

    def _unscaled(self, grads: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        scale = self.dynamic_scale if self.built else self.initial_scale
        pairs = zip(grads, self._replaced(grads, variables), strict=True)
        return [g if g is None or keep else ops.divide(g, scale) for g, keep in pairs]

    def _replaced(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[bool]:
        """Which gradients are, of float8 training, the new values of their variables."""
        if not variables:
            return [False] * len(grads)
        return [self._overwrite_variable_with_gradient(v) for v in variables]

    def apply(
        self,
        grads: Iterable[Any],
        trainable_variables: Iterable[Any] | None = None,
        *,
        unscaled: bool | None = None,
    ) -> None:
        """Unscale, step if every gradient is finite, update the scale.

        Args:
            grads: a gradient for each variable, or None.
            trainable_variables: those of ``build`` when left out.
            unscaled: whether ``grads`` are true gradients; when left out, those that came from
                ``get_unscaled_gradients`` are.

        Raises:
            ValueError: if there are not as many gradients as variables.
        """
        grads = list(grads)
        if any(isinstance(g, keras.Variable) for g in grads):
            raise ValueError(
                "apply() got variables where it expects gradients; the order is "
                "apply(grads, variables) and apply_gradients(zip(grads, variables))"
            )
        if trainable_variables is None and not self.built:
            raise ValueError(
                "apply() got gradients without variables, and the optimizer is not built: say "
                "apply(grads, variables), or call build(variables) first"
            )
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        variables = list(variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"apply() needs one gradient for each variable, got {len(grads)} gradients for "
                f"{len(variables)} variables; None stands for a gradient that does not exist"
            )
        if not grads:  # a model without trainable variables
            return
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
        known = self._pending.are_true(grads, unscaled)
        # Before the check: with a scale below 1 the true gradient can be too large for float32.
        grads = grads if known else self._unscaled(grads, variables)
        largest = self._pending.largest()  # before the user clipped them
        if largest is None or not known:
            largest = self._largest(grads, variables)
        found = Found(self.check_finite(grads), self._pending.loss_finite(), largest)
        if keras.backend.backend() == "tensorflow":
            self._apply_on_replicas(found, grads, variables)
        else:
            self._apply(found, grads, variables)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], *, unscaled: bool | None = None
    ) -> Any:
        """``apply`` on pairs; returns ``iterations``, as Keras does."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables, unscaled=unscaled)
        return self.iterations

    def stateless_apply(
        self, optimizer_variables: list[Any], grads: list[Any], trainable_variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """``apply`` on values instead of variables; returns the new values."""
        # Keras's base class calls apply() in a stateless scope, which is all it takes.
        return super(_KERAS, self).stateless_apply(optimizer_variables, grads, trainable_variables)

    def _largest(self, grads: Sequence[Any], variables: Sequence[Any] = ()) -> Any:
        """Return the largest magnitude of unscaled gradients if the policy needs it, or 0."""
        if not isinstance(self.policy, Predictive):
            return ops.zeros((), "float32")
        pairs = zip(grads, self._replaced(grads, variables), strict=True)
        return largest_of([g for g, keep in pairs if g is not None and not keep])

    def _apply(self, found: Found, grads: list[Any], variables: list[Any]) -> None:
        def step() -> None:
            self.inner_optimizer.apply(grads, variables)

        if keras.backend.backend() == "jax":
            self._step_if(found.finite, step)
        else:
            ops.cond(found.finite, step, lambda: None)
        self._advance(found)

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

    def _apply_on_replicas(self, found: Found, grads: list[Any], variables: list[Any]) -> None:
        """TensorFlow: every replica steps, or none does."""
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        if context is None:
            raise ValueError(
                "apply() was called in a cross-replica context; call it inside strategy.run()"
            )
        total, replicas = tf.distribute.ReduceOp.SUM, context.num_replicas_in_sync
        table = to_table(found, context.replica_id_in_sync_group, replicas)
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            if replicas > 1:
                found = from_table(context.all_reduce(total, table))
            self._apply(found, grads, variables)
            return

        def merged(strategy: Any, table: Any, grads: list[Any], variables: list[Any]) -> None:
            found = from_table(strategy.reduce(total, table, axis=None))
            each, apply = strategy.extended.call_for_each_replica, self.inner_optimizer.apply
            # Here and not in a replica: a branch of a cond there may not merge replicas, and
            # the inner optimizer does.
            ops.cond(found.finite, lambda: each(apply, (grads, variables)), lambda: None)
            self._advance(found)

        context.merge_call(merged, args=(table, grads, variables))

    def _advance(self, found: Found) -> None:
        """Update the scale and the counters after a step."""
        before = ScaleState(*(ops.convert_to_tensor(v) for v in self._state))
        # Keras's own counter is of another dtype on TensorFlow.
        before = before._replace(growth_tracker=ops.cast(before.growth_tracker, "int32"))
        skipped = ops.logical_not(found.finite)
        loss_finite, largest = found.loss_finite, found.largest
        after = update(self.policy, before, skipped, loss_finite, largest, where=ops.where)
        if self._has_half_loss and isinstance(self.policy, Predictive):
            # The gradient of such a loss is the scale, in float16.
            after = after._replace(scale=ops.minimum(after.scale, 2.0**LARGEST_EXPONENT))
        self._assign(after)
        self.skipped_steps.assign(
            ops.add(ops.convert_to_tensor(self.skipped_steps), ops.cast(skipped, "int32"))
        )
        self.last_finite.assign(found.finite)

    def load_own_variables(self, store: Any) -> None:
        """Load the variables, also from a file saved with Keras's class or another policy.

        The scale, the number of skipped steps and the inner optimizer's variables are kept then.
        """
        if not self.built:
            return super().load_own_variables(store)
        names = [*saved.KERAS, *saved.OURS, *saved.PREDICTED]
        own = 5 + len(self._predicted)  # of ``names``
        first, values = (
            len(self._variables) - own,
            [store[str(i)] for i in range(len(store.keys()))],
        )
        held = own + len(values) - len(self.variables)  # by the file; by Keras's own class two
        if held not in (2, 5, 7):
            return super().load_own_variables(store)
        found = dict(zip(names, values[first : first + held], strict=False))
        if held == 7 and found["peak"].shape != ():  # of "Adaptive", with other counters
            found = {name: found[name] for name in ("dynamic_scale", "skipped_steps")}
        state = saved.read(found, self.policy, _LOAD_THE_REST)
        values[first : first + held] = [v.numpy() for v in self._variables[first:]]
        super().load_own_variables({str(i): value for i, value in enumerate(values)})
        return self._restore(state)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Load the values of all ``variables``, the inner optimizer's too."""
        if not self.built:
            return super().set_weights(weights)  # which says why not
        store = {str(i): ops.convert_to_numpy(value) for i, value in enumerate(weights)}
        return self.load_own_variables(store)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Do what the inner optimizer does at the end of ``fit``."""
        super().finalize_variable_values(var_list)
        self.warn_if_idle()

    def warn_if_idle(self) -> None:
        """Warn if a model has trained and ``scale_loss`` was never called."""
        if not self.has_scaled_a_loss:
            warn(
                "gradlift: the train step applied gradients and never called "
                "optimizer.scale_loss(loss): apply() divides them by the scale, so they are too "
                "small by that factor. If model.optimizer was replaced, the step is still that of "
                "the one before: call model.make_train_function(force=True)",
                "keras-the-train-step-never-called-scale_loss",
            )

    def get_config(self) -> dict[str, Any]:
        """Keras's four keys, and the policy where they do not say all of it."""
        config, policy = super().get_config(), self.policy
        if policy == _policy(self.initial_scale, self.dynamic_growth_steps, dynamic=True):
            return config
        fields = asdict(policy)
        if callable(fields.get("on_floor")):
            fields["on_floor"] = keras.saving.serialize_keras_object(fields["on_floor"])
        return {**config, "policy": {"kind": type(policy).__name__, **fields}}

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
            config.pop("initial_scale", None)
            config.pop("dynamic_growth_steps", None)
        return super().from_config(config, custom_objects)


def _check_inner(optimizer: Any) -> None:
    if isinstance(optimizer, _KERAS):
        raise ValueError(
            f"the optimizer is a {type(optimizer).__name__} already, and its gradients would be "
            "unscaled twice: wrap its inner_optimizer, or go on from Keras's own class with "
            "gradlift.keras.from_keras(optimizer)"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "inner_optimizer must be a Keras optimizer, for instance keras.optimizers.Adam(1e-3), "
            f"got {optimizer!r}"
        )


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
    if not isinstance(optimizer, _KERAS):
        raise ValueError(
            "from_keras takes a LossScaleOptimizer, and model.optimizer is a "
            f"{type(optimizer).__name__}: wrap it, LossScaleOptimizer(optimizer), and compile"
        )
    if isinstance(optimizer, LossScaleOptimizer) and policy in (None, optimizer.policy):
        return optimizer
    if policy is None:
        policy = _policy(optimizer.initial_scale, optimizer.dynamic_growth_steps, dynamic=True)
    ours = LossScaleOptimizer(optimizer.inner_optimizer, policy=policy, name=optimizer.name)
    if optimizer.built:
        names = (*saved.KERAS, *saved.OURS, *saved.PREDICTED)
        found = {
            name: getattr(optimizer, name).numpy() for name in names if hasattr(optimizer, name)
        }
        state = saved.read(found, policy, _SET_IT)
        ours.build(optimizer._trainable_variables)
        ours._restore(state)
    _forget_compiled_steps(optimizer)
    return ours


def _forget_compiled_steps(optimizer: Any) -> None:
    """Have the models of ``optimizer`` compile their next step: the last one has it inside.

    A model knows its optimizer and not the other way round, so all objects are looked through.
    """
    for model in gc.get_objects():
        is_model = issubclass(type(model), keras.Model)
        if is_model and getattr(model, "optimizer", None) is optimizer and model.train_function:
            if keras.distribution.distribution() is None:
                model.make_train_function(force=True)
            else:  # It asks for the places of all variables as it is made: the next fit makes it.
                model.train_function = None
