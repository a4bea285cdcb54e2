"""Which modules of a compiled model have cuts, and the factors that they multiply by.

A cut gets into compiled code through the module's ``forward``: an attribute of that name on a
module is what ``torch.compile`` looks out for, so a graph that was compiled without it is
compiled anew, once, whoever compiled it and when. Modules keep their cuts while the model is
watched: a plan that needs fewer of them, or other values, changes numbers alone.

Every trace gets factors of its own, all 1 at first: a new graph is neutral until somebody knows
what it looks like. They lie side by side in one tensor for each device, which a new plan
overwrites. Writing goes round autograd's version counter. That is safe because a compiled
backward pass reads factors only when it runs, never what a forward has saved of them.
"""

from __future__ import annotations

import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from gradlift.torch.adaptive.cuts import CutHook
from gradlift.torch.adaptive.exponents import Assignment, keys_of
from gradlift.torch.compiled.traced_cuts import FactorPair, Region, Traces
from gradlift.torch.names import Names
from gradlift.torch.step.readback import capturing

CUT_MODULE = "_gradlift_cut_module"
_PER_POOL = 512
# What a factor may be, as exponents: a float32 that is not subnormal.
_RANGE = range(-126, 128)

_cut_modules: weakref.WeakValueDictionary[str, CutModule] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class CutModule:
    """A module whose outputs have cuts in compiled code; kept in an attribute of the module.

    The factors of every trace are attributes ``shift0``, ``back0``, ``shift1``, ...: the tracer
    guards those that it has read, and no others.
    """

    def __init__(self, name: str, cuts: CompiledCuts) -> None:
        self.name = name
        # A string, since the tracer may take a whole number for something that varies.
        self.key = f"module {next(_numbers)}"
        self.pairs: list[FactorPair] = []
        self.cuts = weakref.ref(cuts)
        _cut_modules[self.key] = self

    def __deepcopy__(self, memo: Any) -> None:
        """A copied model is not watched."""

    def __reduce__(self) -> Any:
        return type(None), ()


class Pool:
    """Factors on one device: two 0-d views for each pair, of one float32 tensor."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.ones(2 * _PER_POOL, dtype=torch.float32, device=device)
        self.factors = whole.unbind()
        for factor in self.factors:
            # CUDA graphs need not copy what never moves.
            torch._dynamo.mark_static_address(factor, guard=False)
        self.used = 0
        # Has a version counter of its own.
        self._target = whole.data
        self._written = [1.0] * (2 * _PER_POOL)

    def write(self, values: Mapping[int, tuple[int, int]]) -> None:
        """Sets the factors of pairs, given as exponents; all other pairs are 1."""
        wanted = [1.0] * (2 * _PER_POOL)
        for pair, (shift, back) in values.items():
            wanted[2 * pair], wanted[2 * pair + 1] = 2.0**shift, 2.0**back
        if wanted != self._written:
            self._written = wanted
            # A scaler may be collected, and closed, while something is traced in this thread.
            with _disable_current_modes(), torch.no_grad():
                self._target.copy_(torch.tensor(wanted, dtype=torch.float32, device="cpu"))


class CompiledCuts:
    """The cuts of one engine in compiled code.

    Args:
        linear: autograd Functions of the user's that are linear in their gradient.
        half: whether the model has float16 parameters.
    """

    def __init__(self, linear: frozenset[type] = frozenset(), *, half: bool = False) -> None:
        self.traces = Traces(linear, half=half)
        self.stale = False
        """Whether the factors may not be what is wanted: see ``write``."""
        self._pools: dict[torch.device, list[Pool]] = {}
        self._modules: dict[str, nn.Module] = {}

    @property
    def regions(self) -> list[Region]:
        return self.traces.regions

    def superseded(self, region: Region) -> bool:
        """Whether the graph was compiled anew since, for more cuts."""
        own = _names_in(region)
        return any(
            other.generation > region.generation and own <= _names_in(other)
            for other in self.regions
        )

    @property
    def untraced(self) -> bool:
        """Whether code with cuts was compiled by something that traces no backward pass."""
        return not self.regions and any(
            pool.used for pools in self._pools.values() for pool in pools
        )

    @property
    def _crowded(self) -> bool:
        """Whether new places are to be the last ones: torch compiles a function so many times.

        Counted are the graphs that were compiled with cuts, those without, those that new places
        now would add, and as many for another time. Half of the limit is left to the user.
        """
        now = sum(region.generation == self.traces.generation for region in self.regions)
        return 2 * (len(self.regions) + 3 * now) > _recompile_limit()

    def place(self, names: Names, wanted: Iterable[str], spare: Iterable[str] = ()) -> None:
        """Gives modules their cuts, by name; graphs compiled without them are compiled anew.

        Args:
            names: the modules of the model.
            wanted: those that need cuts.
            spare: those that may need some later, and get them before there are too many graphs.
        """
        new = set(wanted) - self._modules.keys()
        if new and self._crowded:
            new |= set(spare) - self._modules.keys()
        modules = names.modules if new else {}
        for name in sorted(new & modules.keys()):
            module = modules[name]
            # Somebody else's forward may be anything, an old one of ours included.
            if "forward" not in module.__dict__ and not isinstance(module, torch.jit.ScriptModule):
                self._modules[name] = module
                self.traces.generation += 1
                object.__setattr__(module, CUT_MODULE, CutModule(name, self))
                object.__setattr__(module, "forward", types.MethodType(_forward_of(module), module))

    def pair(self, cut_module: CutModule, device: torch.device) -> str:
        """A new pair of factors, as the number of the module's attributes that hold them."""
        pools = self._pools.setdefault(device, [])
        if not pools or pools[-1].used == _PER_POOL:
            pools.append(Pool(device))
        pool, number = pools[-1], len(cut_module.pairs)
        at, pool.used = pool.used, pool.used + 1
        cut_module.pairs.append(FactorPair(device, (len(pools) - 1) * _PER_POOL + at))
        setattr(cut_module, f"shift{number}", pool.factors[2 * at])
        setattr(cut_module, f"back{number}", pool.factors[2 * at + 1])
        return str(number)

    def write(
        self, assign: Callable[[Region, Mapping[CutHook, tuple[str, ...]]], Assignment]
    ) -> list[tuple[str, int]]:
        """Sets the factors of every region to what ``assign`` says.

        Returns:
            (key, shift) of each cut that multiplies.
        """
        self.stale = False
        named = [(region, keys_of(region.walk)) for region in self.regions]
        found = [_exponents(region, assign(region, keys).offsets) for region, keys in named]
        make_agree(found)
        self._write({pair: value for values in found for pair, value in values.items()})
        return list(
            dict.fromkeys(
                (keys[cut][0], values[pair][0])
                for (region, keys), values in zip(named, found, strict=True)
                for cut, pair in region.pairs.items()
                if values[pair][0]
            )
        )

    def _write(self, wanted: Mapping[FactorPair, tuple[int, int]]) -> None:
        for device, pools in self._pools.items():
            if capturing(device):
                self.stale = True
                continue
            for index, pool in enumerate(pools):
                first = index * _PER_POOL
                own = range(first, first + _PER_POOL)
                pool.write(
                    {
                        pair.number - first: value
                        for pair, value in wanted.items()
                        if pair.device == device and pair.number in own
                    }
                )

    def close(self) -> None:
        """Takes the cuts away; compiled graphs that have some run with factors of 1."""
        for module in self._modules.values():
            module.__dict__.pop(CUT_MODULE, None)
            # Somebody may have wrapped it since; without its cut_module it changes nothing.
            placed = getattr(module.__dict__.get("forward"), "__func__", None)
            if getattr(placed, "__code__", None) is forward.__code__:
                del module.__dict__["forward"]
        self._modules = {}
        self.traces.generation += 1
        self.traces.regions.clear()
        self._write({})


def _names_in(region: Region) -> set[str]:
    return {name for edge in region.walk.cuts for name, _ in edge.cut.names}


def _recompile_limit() -> int:
    config: Any = torch._dynamo.config
    return getattr(config, "recompile_limit", None) or config.cache_size_limit


def _exponents(region: Region, offsets: list[int]) -> dict[FactorPair, tuple[int, int]]:
    """Both exponents of each cut of a region; all 0 if one cannot be had."""
    values = {
        region.pairs[edge.cut]: (
            offsets[edge.upstream] - offsets[edge.downstream],
            -offsets[edge.upstream],
        )
        for edge in region.walk.cuts
    }
    if all(shift in _RANGE and back in _RANGE for shift, back in values.values()):
        return values
    return dict.fromkeys(values, (0, 0))


def make_agree(found: list[dict[FactorPair, tuple[int, int]]]) -> None:
    """Regions that share a pair, by a graph traced twice, want the same there or are neutral."""
    first: dict[FactorPair, int] = {}
    index = 0
    while index < len(found):
        for pair, value in found[index].items():
            other = first.setdefault(pair, index)
            if found[other][pair] != value:
                for which in (other, index):
                    found[which] = dict.fromkeys(found[which], (0, 0))
                # What they share with others may differ now.
                first, index = {}, -1
                break
        index += 1


# What the compiler sees.


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, with cuts on its outputs where it is being compiled.

    Its name makes a pickled or copied module get its class's own forward back.
    """
    output = type(self).forward(self, *args, **kwargs)
    cut_module = getattr(self, CUT_MODULE, None)
    # Not ``is_compiling``: an export would take the cuts with it.
    if (
        cut_module is None
        or not torch.compiler.is_dynamo_compiling()
        or not torch.is_grad_enabled()
    ):
        return output
    return _marked(cut_module, output, 0)[0]


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """``forward`` with the signature of the module's own, which trainers and generators read."""
    try:
        signature = inspect.signature(type(module).forward)
    except (TypeError, ValueError):
        return forward
    own = types.FunctionType(forward.__code__, forward.__globals__, forward.__name__)
    own.__doc__ = type(module).forward.__doc__
    own.__signature__ = signature  # type: ignore[attr-defined]
    return own


def _marked(cut_module: CutModule, value: Any, count: int) -> tuple[Any, int]:
    """``value`` with cuts on its tensors, and how many there were: ``engine.tensors_in``'s."""
    if isinstance(value, Tensor):
        if value.requires_grad and (value.is_floating_point() or value.is_complex()):
            number = _new_pair(cut_module.key, str(value.device))
            if number:
                shift, back = (
                    getattr(cut_module, "shift" + number),
                    getattr(cut_module, "back" + number),
                )
                value = mark(value, cut_module.key, count, number, shift, back)
        return value, count + 1
    if type(value) is dict:
        marked = {}
        for key, item in value.items():
            marked[key], count = _marked(cut_module, item, count)
        return marked, count
    if type(value) in (tuple, list):
        items = []
        for item in value:
            item, count = _marked(cut_module, item, count)
            items.append(item)
        return (tuple(items) if type(value) is tuple else items), count
    return value, count + _tensors_in(value)


def _tensors_in(value: Any) -> int:
    """How many tensors there are in what gets no cuts: those after it keep their numbers."""
    if isinstance(value, Tensor):
        return 1
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (tuple, list)):
        items = list(value)
    else:
        items = [getattr(value, name, None) for name in getattr(value, "__dataclass_fields__", ())]
    count = 0
    for item in items:
        count += _tensors_in(item)
    return count


@torch.compiler.assume_constant_result
def _new_pair(key: str, device: str) -> str:
    """The number of new factors in their module's attributes; empty if there can be no cut."""
    cut_module = _cut_modules.get(key)
    cuts = cut_module.cuts() if cut_module is not None else None
    if cut_module is None or cuts is None or _inside_another_op():
        return ""
    return cuts.pair(cut_module, torch.device(device))


def _inside_another_op() -> bool:
    """Whether a function is traced that an op like ``torch.cond`` calls.

    Those allow no result that is one of the operands, and ``mark`` returns its own.
    """
    tracer: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    tracer = tracer.output.current_tracer
    while tracer.parent is not None:
        if "checkpoint" not in str(getattr(tracer, "source_target", "")):
            return True
        tracer = tracer.parent
    return False


def mark(tensor: Tensor, key: str, output: int, number: str, shift: Tensor, back: Tensor) -> Tensor:
    """Puts a cut on a tensor while its graph is traced; returns it as it is."""
    cut_module = _cut_modules.get(key)
    cuts = cut_module.cuts() if cut_module is not None else None
    if cut_module is not None and cuts is not None and tensor.grad_fn is not None and _is_tracing():
        cuts.stale = True
        cuts.traces.place(
            tensor, cut_module.name, output, cut_module.pairs[int(number)], shift, back
        )
    return tensor


def _is_tracing() -> bool:
    """Whether AOTAutograd is at work; a backend without it would run ``mark`` in every step."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # type: ignore[attr-defined]


torch.compiler.allow_in_graph(mark)
