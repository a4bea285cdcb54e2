"""The rest of Apex, which is not offered: each name says what to use instead.

``from gradlift.apex.parallel import DistributedDataParallel`` and the like fail with an
``ImportError`` that names the replacement, rather than with one about a missing module; so do
modules inside them, as in ``from gradlift.apex.parallel.LARC import LARC``.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

REPLACEMENTS = {
    "optimizers": {
        "FusedAdam": "torch.optim.AdamW(..., fused=True), or torch.optim.Adam for "
        "adam_w_mode=False",
        "FusedSGD": "torch.optim.SGD(..., fused=True)",
        "FusedAdagrad": "torch.optim.Adagrad(..., fused=True)",
        "FusedLAMB": "torch.optim.AdamW, or a LAMB from another package; torch has none",
        "FusedMixedPrecisionLamb": "torch.optim.AdamW, or a LAMB from another package; torch "
        "has none",
        "FusedNovoGrad": "torch.optim.AdamW, or a NovoGrad from another package; torch has none",
    },
    "parallel": {
        "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
        "Reducer": "torch.nn.parallel.DistributedDataParallel",
        "SyncBatchNorm": "torch.nn.SyncBatchNorm",
        "convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        "create_syncbn_process_group": "torch.distributed.new_group",
        "LARC": "clipping (scaler.step(optimizer, max_norm=...)), or a LARS from another package",
    },
    "normalization": {
        "FusedLayerNorm": "torch.nn.LayerNorm",
        "MixedFusedLayerNorm": "torch.nn.LayerNorm",
        "FusedRMSNorm": "torch.nn.RMSNorm",
        "MixedFusedRMSNorm": "torch.nn.RMSNorm",
    },
    "fp16_utils": {
        "FP16_Optimizer": "amp.initialize(model, optimizer, opt_level='O2')",
        "network_to_half": "amp.initialize(model, opt_level='O3')",
        "convert_network": "amp.initialize(model, opt_level='O2')",
        "BN_convert_float": "amp.initialize(..., keep_batchnorm_fp32=True)",
        "prep_param_lists": "amp.initialize(model, optimizer, opt_level='O2')",
        "model_grads_to_master_grads": "amp.scale_loss, which does it under O2",
        "master_params_to_model_params": "optimizer.step(), which does it under O2",
        "DynamicLossScaler": "gradlift.torch.GradScaler(policy=gradlift.Dynamic.apex())",
        "LossScaler": "gradlift.torch.GradScaler(policy=gradlift.Static(scale))",
    },
    "multi_tensor_apply": {
        "multi_tensor_applier": "torch._foreach_mul_ and its kin, or gradlift.torch.GradScaler",
    },
    "mlp": {"MLP": "torch.nn.Sequential of Linear and ReLU, under torch.compile"},
    "fused_dense": {
        "FusedDense": "torch.nn.Linear",
        "FusedDenseGeluDense": "torch.nn.Sequential of Linear, GELU and Linear, under "
        "torch.compile",
    },
    "RNN": {
        "LSTM": "torch.nn.LSTM",
        "GRU": "torch.nn.GRU",
        "ReLU": "torch.nn.RNN(nonlinearity='relu')",
        "Tanh": "torch.nn.RNN",
        "mLSTM": "a loop over torch.nn.LSTMCell",
    },
    "contrib": {
        "bottleneck": "torchvision.models.resnet.Bottleneck, under torch.compile",
        "clip_grad": "torch.nn.utils.clip_grad_norm_, or scaler.step(optimizer, max_norm=...)",
        "conv_bias_relu": "torch.nn.Conv2d and ReLU, under torch.compile",
        "cudnn_gbn": "torch.nn.SyncBatchNorm",
        "fmha": "torch.nn.functional.scaled_dot_product_attention",
        "focal_loss": "torchvision.ops.sigmoid_focal_loss",
        "group_norm": "torch.nn.GroupNorm",
        "groupbn": "torch.nn.BatchNorm2d and ReLU, or torch.nn.SyncBatchNorm",
        "index_mul_2d": "x[index] * y, under torch.compile",
        "layer_norm": "torch.nn.LayerNorm",
        "multihead_attn": "torch.nn.MultiheadAttention, or "
        "torch.nn.functional.scaled_dot_product_attention",
        "optimizers": "torch.optim with fused=True, and FSDP2 in place of the distributed ones",
        "sparsity": "torch.sparse.to_sparse_semi_structured",
        "transducer": "torchaudio.functional.rnnt_loss",
        "xentropy": "torch.nn.functional.cross_entropy(..., label_smoothing=...)",
    },
    "transformer": {},
}

ELSEWHERE = {
    "contrib": "torch's own operators (scaled_dot_product_attention, cross_entropy, GroupNorm)",
    "transformer": "Megatron-Core",
}


class Gone(ModuleType):
    """A part of Apex that only says what to use instead."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"Not offered; see {__name__}.")
        self.__path__ = []  # a package's, without which no finder is asked for what is inside

    def __getattr__(self, name: str) -> Any:
        part = self.__name__.rsplit(".", 1)[-1]
        instead = _instead(part, name)
        if name.startswith("__") or instead is None:
            raise AttributeError(f"apex.{part}.{name} is not offered by gradlift")
        raise ImportError(f"apex.{part}.{name} is not offered by gradlift; use {instead}")


class Inside(MetaPathFinder):
    """Finds no module inside of those parts, and says what to use instead.

    Args:
        package: the one that stands in for Apex.
    """

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Called by an import that no other finder could serve."""
        outer, _, name = fullname.removeprefix(f"{self.package}.").partition(".")
        if not fullname.startswith(f"{self.package}.") or outer not in REPLACEMENTS:
            return
        instead = _instead(outer, name)
        advice = f"use {instead}" if instead else "it replaces apex.amp alone, see docs/apex.md"
        raise ImportError(f"apex.{outer}.{name} is not offered by gradlift; {advice}")


def _instead(part: str, name: str) -> str | None:
    """For a class, a function, or the module that Apex has it in: FusedAdam, fused_adam."""
    known = REPLACEMENTS[part]
    alike = {_bare(key): use for key, use in known.items()}
    return known.get(name) or alike.get(_bare(name)) or ELSEWHERE.get(part)


def _bare(name: str) -> str:
    return name.replace("_", "").lower()


def parts(package: str) -> dict[str, ModuleType]:
    """Stand-ins for Apex's other subpackages, importable from ``package``."""
    made: dict[str, ModuleType] = {}
    for part in REPLACEMENTS:
        name = f"{package}.{part}"
        made[part] = sys.modules[name] = Gone(name)
    if not any(isinstance(finder, Inside) for finder in sys.meta_path):
        sys.meta_path.append(Inside(package))
    return made
