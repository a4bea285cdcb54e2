"""What in a graph may do more to its gradient than multiply: ops, Functions, and users' hooks.

A part of the graph may be stored times a power of two if all in it is linear. Torch's own ops are,
but for two whose formulas take other steps for other magnitudes. What others wrote may do
anything: clamp, compare, add a loss of its own. An autograd Function is a node of the graph, and
seen there; one that changes a view in place is hidden inside torch's ``CopySlices``, and all of
these are suspected while a graph is alive that was made by a Function that changes its input. A
hook at a module's output is found beside the cut: hooks of one tensor, or of one node, share a
dict.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.autograd.function import BackwardCFunction, Function

Node = Any
"""A ``torch.autograd.graph.Node``; torch gives each C++ node a class of its own."""

# Functions known to be linear in their gradient, though written in Python: module and name.
# Those that exchange gradients between ranks are not here: the ranks would have to agree on
# the exponent of every pass.
LINEAR = {
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "RegisterPreBackwardFunction"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "RegisterPostBackwardFunction"),
    ("torch.nn.parallel.distributed", "_DDPSink"),
    ("torch.nn.modules._functions", "CrossMapLRN2d"),
}

# Nodes of torch's own whose result is another one at another scale: one picks its formula by the
# norm of a matrix that holds the gradient, one takes the gradient's logarithm.
_BY_MAGNITUDE = ("LinalgMatrixExpBackward", "LogcumsumexpBackward")

IN_PLACE = "CopySlices"
HIDDEN = "an autograd Function may be hidden in an in-place change of a view"

_reasons: dict[type, str | None] = {}


def not_linear(node: Node, linear: frozenset[type]) -> str | None:
    """Why a node may not be linear in its gradient, or None."""
    kind = type(node)
    if kind in _reasons:
        return _reasons[kind]
    if isinstance(node, BackwardCFunction):
        return _function_not_linear(node, linear)
    name = kind.__name__
    # Extensions' Functions have no class of their own in Python, torch's built-in nodes do.
    if name == "CppFunction":
        if "CppNode" not in node.name():
            return None
        return f"the C++ autograd Function {node.name()} may not be linear in its gradient"
    if name == IN_PLACE:
        return HIDDEN if hidden_function(linear) else None
    reason = f"{name} is not linear in floating point" if name.startswith(_BY_MAGNITUDE) else None
    # Torch's own classes live as long as the process.
    _reasons[kind] = reason
    return reason


def _function_not_linear(node: Node, linear: frozenset[type]) -> str | None:
    function = getattr(node, "_forward_cls", None)
    if function in linear or (
        (getattr(function, "__module__", ""), getattr(function, "__name__", "")) in LINEAR
    ):
        return None
    name = getattr(function, "__name__", type(node).__name__)
    return f"the autograd Function {name} may not be linear in its gradient"


# Functions that change their input.


def hidden_function(linear: frozenset[type]) -> type | None:
    """An autograd Function that changes its input and has a node in some graph; None without.

    Nothing lists nodes short of a look at everything there is. But each holds its class, so that
    a class without any is held as often as one that has never been used. Who else holds it makes
    it look used, which is the safe side.
    """
    held = {kind: sys.getrefcount(kind) for kind in BackwardCFunction.__subclasses__()}
    unused = held[_Unused._backward_cls]  # type: ignore[attr-defined]
    for kind, times in held.items():
        function = getattr(kind, "_forward_cls", None)
        if times == unused or function is None or function in linear:
            continue
        if not _is_ours_or_torchs(function) and changes_input(function):
            return function
    return None


class _Unused(Function):
    """Has no node, ever."""


_changes: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def changes_input(function: type) -> bool:
    """Whether a Function changes an input in place, as far as its code tells."""
    if function not in _changes:
        _changes[function] = _changes_input(function)
    return _changes[function]


def _changes_input(function: type) -> bool:
    """Whether its forward, or what that calls, says ``mark_dirty``."""
    stack: list[Any] = [getattr(function, name, None) for name in ("forward", "setup_context")]
    seen: set[int] = set()
    while stack:
        found = stack.pop()
        code = getattr(found, "__code__", found)
        if not isinstance(code, types.CodeType) or id(code) in seen:
            continue
        seen.add(id(code))
        if "mark_dirty" in code.co_names or "mark_dirty" in code.co_consts:
            return True
        stack += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        known = getattr(found, "__globals__", {})
        stack += [known.get(name) for name in code.co_names]
        stack += [getattr(function, name, None) for name in code.co_names]
    return False


# Hooks.


def hooked_around(hooks: Mapping[int, Any] | None, own: Any) -> tuple[bool, bool]:
    """Whether a user's hook runs before our own on the same tensor, and whether one runs after."""
    before = after = False
    passed = False
    for hook in hooks.values() if hooks is not None and len(hooks) > 1 else ():
        passed = passed or hook is own
        if may_change(hook):
            before, after = before or not passed, after or passed
    return before, after


def is_hooked(node: Node) -> bool:
    """Whether a user has put a hook on a node, before or after its backward."""
    return any(
        may_change(hook)
        for register in (node.register_prehook, node.register_hook)
        for hook in _hooks_of(register)
    )


def _hooks_of(register: Callable[[Any], Any]) -> list[Any]:
    """All hooks of a kind on a node: torch shows their dict to whoever registers one."""
    handle = register(lambda *args: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return [] if hooks is None else list(hooks.values())


def may_change(hook: Any) -> bool:
    """Whether a hook is somebody else's, and does not say that it ``only_looks``."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return not _is_ours_or_torchs(hook) and not getattr(hook, "only_looks", False)


def _is_ours_or_torchs(thing: Any) -> bool:
    # Torch's own hooks (FSDP's, those on several gradients) start something and return nothing new.
    module = getattr(thing, "__module__", None) or ""
    return module.split(".")[0] in ("torch", "gradlift")
