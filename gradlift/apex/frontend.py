"""``initialize``: set models, optimizers and loss scalers up for a level."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from gradlift.apex import casts, levels, masters, models
from gradlift.apex.scaling import LossScaler, _amp_state

PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DataParallel)


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Set models and optimizers up for mixed precision, as ``apex.amp.initialize`` did.

    A training loop::

        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            optimizer.step()

    Args:
        models: a module or a list of modules, in float32, before any parallel wrapper.
        optimizers: an optimizer, a list of optimizers, or None for inference.
        enabled: if False every call of amp passes its input through.
        opt_level: ``"O0"`` float32, ``"O1"`` functions cast, ``"O2"`` float16 models with float32
            masters, ``"O3"`` float16 throughout.
        cast_model_type: instead of the level's dtype for weights; False casts nothing.
        patch_torch_functions: False for O1 without its casts.
        keep_batchnorm_fp32: whether O2 and O3 leave batch norms in float32.
        master_weights: whether O2 and O3 step float32 copies of the weights.
        loss_scale: a number, or ``"dynamic"``.
        cast_model_outputs: a dtype for the models' floating outputs.
        num_losses: how many losses have a scale of their own.
        verbosity: 0 for no lines about levels and skipped steps.
        min_loss_scale: a dynamic scale never falls below this.
        max_loss_scale: a dynamic scale never grows above this.

    Returns:
        The models and the optimizers, or the models alone without optimizers; lists for lists.
    """
    casts.turn_off()
    _amp_state.reset(verbosity)
    if not enabled:
        _amp_state.initialized = True
        return models if optimizers is None else (models, optimizers)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    chosen = levels.properties(opt_level, overrides)
    policy = levels.policy(chosen, min_loss_scale, max_loss_scale)
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses must be a whole number above 0, got {num_losses!r}")
    nets = _modules(models)
    opts = _optimizers(optimizers)
    _check_models(nets, chosen)
    devices = _device_types(nets)
    _prepare(nets, opts, chosen, cast_model_outputs)
    _amp_state.loss_scalers = [LossScaler(i, policy, devices[0]) for i in range(num_losses)]
    _amp_state.opt_properties, _amp_state.initialized = chosen, True
    if chosen.patch_torch_functions:
        casts.turn_on(devices)
    _amp_state.say(f"gradlift amp: {chosen}")
    result = nets if isinstance(models, (list, tuple)) else nets[0]
    if optimizers is None:
        return result
    return result, opts if isinstance(optimizers, (list, tuple)) else opts[0]


def _prepare(
    nets: list[torch.nn.Module],
    opts: list[torch.optim.Optimizer],
    chosen: levels.Properties,
    outputs: torch.dtype | None,
) -> None:
    dtype = chosen.cast_model_type
    stepped = itertools.chain.from_iterable(map(masters.master_params, opts))
    weights = models.Float32Weights(stepped if chosen.master_weights else ())
    for net in nets:
        if dtype is None:
            models.cast_forward(net, None, outputs)
            continue
        models.cast(net, dtype, bool(chosen.keep_batchnorm_fp32))
        models.cast_forward(net, dtype, outputs or torch.float32)
        if dtype in models.HALF:
            models.float32_checkpoints(net, weights)
    weights.forget_uncast()
    for opt in opts:
        masters.take_over(opt, weights if chosen.master_weights else None, _amp_state.say)
        if opt.state:
            opt.load_state_dict(opt.state_dict())  # casts momenta to their parameter's dtype


def _modules(models: Any) -> list[torch.nn.Module]:
    nets = list(models) if isinstance(models, (list, tuple)) else [models]
    for net in nets:
        if not isinstance(net, torch.nn.Module):
            raise TypeError(f"models must be a module or a list of modules, got {net!r}")
    if not nets:
        raise ValueError("models must not be empty")
    return nets


def _optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    opts = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for opt in opts:
        if not hasattr(opt, "param_groups"):
            raise TypeError(f"optimizers must be an optimizer or a list of them, got {opt!r}")
    return opts


def _check_models(nets: list[torch.nn.Module], chosen: levels.Properties) -> None:
    for net in nets:
        if chosen.cast_model_type in models.HALF and isinstance(net, PARALLEL):
            raise ValueError(
                f"wrap the model in {type(net).__name__} after amp.initialize and not before: "
                "casting the weights breaks the wrapper"
            )
        for name, tensor in itertools.chain(net.named_parameters(), net.named_buffers()):
            if tensor.dtype is torch.float16 and not _amp_state.allow_incoming_model_not_fp32:
                raise ValueError(
                    f"{name!r} is float16; give amp.initialize a float32 model, it does the casting"
                )


def _device_types(nets: list[torch.nn.Module]) -> list[str]:
    found = dict.fromkeys(p.device.type for net in nets for p in net.parameters())
    if list(found) in ([], ["cpu"]) and torch.cuda.is_available():
        # The model may be moved after initialize; it must not train in float32 unnoticed then.
        found["cuda"] = None
    return list(found) or ["cpu"]
