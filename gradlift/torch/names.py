"""Module names as the user wrote them.

Wrappers put their own attribute in front of every name: ``module.`` (DataParallel, DDP),
``_orig_mod.`` (torch.compile), ``_fsdp_wrapped_module.``. A pin or a plan made on the bare
model must mean the same on the wrapped one, so those parts are taken out, by what the wrapper
is and not by its spelling alone: a user's own submodule may well be called ``module``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torch import nn

# Attribute names that no user would choose for a part of a network.
_WRAPPER_ATTRIBUTES = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)


class Names:
    """The modules of a model, by their names without wrappers' prefixes."""

    def __init__(self, model: nn.Module) -> None:
        self.of_module: dict[int, str] = {}
        """First name of each module, by ``id``; the module is kept alive beside it."""
        self._modules: list[nn.Module] = []
        self._known: dict[str, str] = {}
        self.of_parameter: dict[int, str] = {}
        for raw, module in model.named_modules(remove_duplicate=False):
            name = _stripped(model, raw)
            first = self.of_module.setdefault(id(module), name)
            self._modules.append(module)
            self._known.setdefault(name, first)
            self._known.setdefault(raw, first)
        for raw, parameter in model.named_parameters():
            self.of_parameter[id(parameter)] = _stripped(model, raw)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by first name; of a wrapper and what it wraps, the latter."""
        return {self.of_module[id(module)]: module for module in self._modules}

    @property
    def order(self) -> dict[str, int]:
        """The place of each module's first name in the model."""
        return {name: i for i, name in enumerate(dict.fromkeys(self.of_module.values()))}

    def resolve_offsets(self, offsets: Mapping[str, int]) -> dict[str, int]:
        """Offsets by the first name of each module.

        Raises:
            ValueError: a name is not a module's, or two are one module's with different offsets.
        """
        first = {name: self.resolve(name) for name in offsets}
        found: dict[str, int] = {}
        for name, offset in offsets.items():
            if found.setdefault(first[name], offset) != offset:
                raise ValueError(
                    f"pins contradict each other: {first[name]!r} and {name!r} are one module, "
                    f"and {found[first[name]]} is not {offset}"
                )
        return found

    def resolve(self, name: str) -> str:
        """The first name of a module, which may have several.

        Raises:
            ValueError: the name is not a module's; the message lists close matches.
        """
        if name in self._known:
            return self._known[name]
        close = difflib.get_close_matches(str(name), self._known, n=3)
        hint = f"; close matches: {', '.join(map(repr, close))}"
        if not close:
            hint = "; names are those of model.named_modules()"
        raise ValueError(f"the model has no module named {name!r}{hint}")


def check_offsets(offsets: Mapping[str, int], limit: int) -> None:
    """Refuses what is not a whole number within ``limit``."""
    if not isinstance(offsets, Mapping):
        raise ValueError(f"pins are a dict of module names and offsets, got {offsets!r}")
    for name, offset in offsets.items():
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise ValueError(f"the offset of {name!r} must be a whole number, got {offset!r}")
        if abs(offset) > limit:
            raise ValueError(
                f"the offset of {name!r} must lie between -{limit} and {limit}, got {offset!r}"
            )


def _stripped(model: nn.Module, raw: str) -> str:
    parent: nn.Module = model
    kept: list[str] = []
    for part in raw.split(".") if raw else []:
        if not _is_wrapping(parent, part):
            kept.append(part)
        child = getattr(parent, part, None)
        if not isinstance(child, nn.Module):
            # What is left is a parameter's own name, dots included.
            break
        parent = child
    return ".".join(kept)


def _is_wrapping(parent: nn.Module, part: str) -> bool:
    """Whether ``part`` is a wrapper's name for the one module that it wraps."""
    if part in _WRAPPER_ATTRIBUTES:
        return True
    return part == "module" and len(parent._modules) == 1 and not parent._parameters
