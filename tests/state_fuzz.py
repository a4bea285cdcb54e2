"""Damaged states, and what is expected of whoever loads them; see ``test_state_fuzz``.

    python tests/state_fuzz.py 20000 [SEED]

prints for each class how many were refused in words, accepted and valid, or wrong. A damaged state
may be accepted only if it is truly valid. What that means is written here a second time, apart from
the package's own checks: types and ranges of each entry, and that the scaler, three steps later,
still has a finite scale and a state that loads back to itself."""

from __future__ import annotations

import collections
import copy
import json
import math
import random
import sys
import warnings
from typing import Any

import torch
from scaler_parts import agreement_of, controller_of, engine_of, policy_of
from torch import nn

from gradlift import Dynamic
from gradlift.plan.adaptive_policy import AdaptivePolicy
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.histogram import Histogram
from gradlift.plan.observations import ProbedTensor, ProbeResult, Record
from gradlift.plan.plan import Plan
from gradlift.torch import AdaptiveGradScaler, GradScaler, MasterWeights
from gradlift.torch.model_identity import identity

KEY = "gradlift_adaptive"


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def run(scaler: Any, model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    dtype = next(model.parameters()).dtype
    inputs = torch.linspace(-1, 1, 12).view(4, 3).to(dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
            output = model(inputs)
        scaler.scale(output.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


# What is damaged. Each target makes a fresh object, a state of another one, loads, and tells all
# that could have changed.


class Scaler:
    """A ``GradScaler``."""

    def fresh(self) -> Any:
        model = network()
        scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        run(scaler, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        return scaler, model

    def state(self) -> Any:
        model = network()
        policy = Dynamic(init_scale=2.0**10, growth_interval=4, hysteresis=2)
        scaler = GradScaler("cpu", policy=policy)
        run(scaler, model, torch.optim.SGD(model.parameters(), lr=0.1))
        return scaler.state_dict()

    def load(self, made: Any, state: Any) -> None:
        made[0].load_state_dict(state)

    def everything(self, made: Any) -> Any:
        scaler = made[0]
        return (
            scaler.state_dict(),
            repr(scaler.policy),
            scaler._init_scale,
            agreement_of(scaler)._loaded,
        )

    def is_valid(self, state: Any) -> bool:
        return valid_scaler(state)

    def works(self, made: Any) -> bool:
        scaler, model = made
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(scaler, model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = scaler.state_dict()
        again = self.fresh()[0]
        again.load_state_dict(copy.deepcopy(state))
        return 0 < scaler.get_scale() < math.inf and again.state_dict() == state


class Adaptive(Scaler):
    """An ``AdaptiveGradScaler``; its own part is damaged as JSON and as text."""

    rule = "range"

    def fresh(self) -> Any:
        model = network()
        scaler = AdaptiveGradScaler(model, "cpu", rule=self.rule)
        run(scaler, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        return scaler, model

    def state(self) -> Any:
        model = network()
        scaler = AdaptiveGradScaler(model, "cpu", rule=self.rule, interval=4)
        # The first of the steps that a state holds as pending is a probe.
        run(scaler, model, torch.optim.SGD(model.parameters(), lr=0.1), 10)
        state = scaler.state_dict()
        return {**state, KEY: json.loads(state[KEY])}

    def load(self, made: Any, state: Any) -> None:
        if isinstance(state, dict) and isinstance(state.get(KEY), dict):
            state = {**state, KEY: as_json(state[KEY])}
        made[0].load_state_dict(state)

    def everything(self, made: Any) -> Any:
        scaler, engine = made[0], engine_of(made[0])
        held = (
            controller_of(scaler).step_number,
            engine.pins,
            engine.offsets,
            engine.probing,
            engine.probes.wide,
        )
        return (
            *super().everything(made),
            held,
            policy_of(scaler).to_dict(),
            len(controller_of(scaler).pending),
        )

    def is_valid(self, state: Any) -> bool:
        if not isinstance(state, dict):
            return False
        rest = {k: v for k, v in state.items() if k != KEY}
        if KEY not in state:
            return valid_scaler(rest)
        own = state[KEY]
        own = json.loads(json.dumps(own)) if isinstance(own, dict) else own
        return valid_scaler(rest) and valid_adaptive(own, self.rule)


class Paper(Adaptive):
    rule = "zhao2019"


class Masters:
    """A ``MasterWeights``."""

    def fresh(self) -> Any:
        model = network(1).to(torch.bfloat16)
        optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-2))
        run(GradScaler("cpu", init_scale=16.0), model, optimizer, 1)
        return optimizer, model

    def state(self) -> Any:
        model = network().to(torch.bfloat16)
        optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-2))
        run(GradScaler("cpu", init_scale=16.0), model, optimizer)
        return copy.deepcopy(optimizer.state_dict())

    def load(self, made: Any, state: Any) -> None:
        made[0].load_state_dict(state)

    def everything(self, made: Any) -> Any:
        optimizer, model = made
        tensors = [p.tolist() for p in (*model.parameters(), *optimizer.masters)]
        return tensors, repr(optimizer.state_dict()), repr(optimizer.param_groups)

    def is_valid(self, state: Any) -> bool:
        return valid_masters(state)

    def works(self, made: Any) -> bool:
        optimizer, model = made
        if max(optimizer.param_groups[0][name] for name in ("lr", "weight_decay", "eps")) > 1e6:
            return True  # numbers that torch takes, and that no weights survive
        run(GradScaler("cpu", init_scale=16.0), model, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        again = self.fresh()
        again[0].load_state_dict(state)
        finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
        return finite and repr(again[0].state_dict()) == repr(state)


class Policy:
    """An ``AdaptivePolicy``."""

    def fresh(self) -> Any:
        return AdaptivePolicy("float16", 1e-3, 3)

    def state(self) -> Any:
        policy = self.fresh()
        graph = Graph((Component(("b",)), Component(("a",))), (Cut("a", 0, 1),))
        near, far = (Histogram(((low, 40), (low + 9, 60)), 3, 0) for low in (-12, -60))
        tensors = (
            ProbedTensor("b.weight", (0,), near, 8, "float16", is_parameter=True),
            ProbedTensor("a.weight", (1,), far, 8, "float16", is_parameter=True),
        )
        result = ProbeResult(graph, tensors, {"b.weight": 0, "a.weight": 1})
        for step in range(6):
            policy.observe(Record(step, 8, -3, False), step + 1, result)
        policy.observe(Record(6, 8, None, True), 8, overflowed=["b.weight"])
        assert policy.plan.active
        return json.loads(json.dumps(policy.to_dict()))

    def load(self, made: Any, state: Any) -> None:
        made.load(state)

    def everything(self, made: Any) -> Any:
        return made.to_dict()

    def is_valid(self, state: Any) -> bool:
        return valid_policy(state, "range")

    def works(self, made: Any) -> bool:
        again = self.fresh()
        again.load(json.loads(json.dumps(made.to_dict())))
        return again.to_dict() == made.to_dict()


class PlannedComponent:
    """A ``Plan``, which is made anew and has nothing to change."""

    def fresh(self) -> Any:
        return []

    def state(self) -> Any:
        return Policy().state()["plan"]

    def load(self, made: Any, state: Any) -> None:
        made.append(Plan.from_dict(state))

    def everything(self, made: Any) -> Any:
        return list(made)

    def is_valid(self, state: Any) -> bool:
        return valid_plan(state)

    def works(self, made: Any) -> bool:
        str(made[0])
        return Plan.from_dict(json.loads(json.dumps(made[0].to_dict()))) == made[0]


TARGETS: dict[str, Any] = {
    "GradScaler": Scaler(),
    "AdaptiveGradScaler": Adaptive(),
    "AdaptiveGradScaler, the paper's rule": Paper(),
    "MasterWeights": Masters(),
    "AdaptivePolicy": Policy(),
    "Plan": PlannedComponent(),
}


# The second opinion: what a state may hold.


def is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return bool(low <= value <= high) and abs(value) < 2**1023


def is_whole(value: Any, low: int = 0, high: int = 2**53) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_step(value: Any) -> bool:
    return is_whole(value, 0, 2**48)


def is_list(value: Any, check: Any, most: float = math.inf) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= most and all(map(check, value))


def is_dict(value: Any, **checks: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == checks.keys()
        and all(check(value[name]) for name, check in checks.items())
    )


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def maybe(check: Any) -> Any:
    return lambda value: value is None or check(value)


SCALES = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


def is_power_of_two(value: Any) -> bool:
    """As float32 holds it."""
    return is_number(value, *SCALES) and math.frexp(torch.tensor(float(value)).item())[0] == 0.5


def valid_scaler(state: Any) -> bool:
    if not isinstance(state, dict):
        return False
    own = state.get("gradlift")
    rest = {k: v for k, v in state.items() if k != "gradlift"}
    if isinstance(own, dict) and "predictive" in own:
        predictive, own = own["predictive"], {k: v for k, v in own.items() if k != "predictive"}
        if not is_dict(
            predictive,
            headroom=lambda v: is_whole(v, 0, 15),
            peak=lambda v: is_number(v, 0.0, SCALES[1]),
            gap=lambda v: is_number(v, 0.0, 12.0),
        ) or not all(is_power_of_two(own.get(name)) for name in ("min_scale", "max_scale")):
            return False
    if "gradlift" in state and not (
        is_dict(
            own,
            version=lambda v: is_whole(v, 1, 1),
            hysteresis=lambda v: is_whole(v, 1, 2**31 - 1),
            consecutive_hysteresis=is_flag,
            min_scale=lambda v: is_number(v, *SCALES),
            max_scale=lambda v: is_number(v, *SCALES),
            hysteresis_tracker=lambda v: is_whole(v, 0, 2**31 - 1),
            skipped_steps=lambda v: is_whole(v, 0, 2**53),
            scheduler_flags=lambda v: is_list(v, lambda row: is_list(row, is_flag, 8)),
            steps=lambda v: is_whole(v, 0, 2**53),
            mended=is_mended,
            growth_delay=lambda v: is_whole(v, 0, 2**31 - 1),
        )
        and own["min_scale"] <= own["max_scale"]
        and own["hysteresis_tracker"] <= own["hysteresis"]
    ):
        return False
    return is_dict(
        rest,
        scale=lambda v: is_number(v, *SCALES),
        growth_factor=lambda v: is_number(v, 1.0, SCALES[1]),
        backoff_factor=lambda v: is_number(v, SCALES[0], 1.0),
        growth_interval=lambda v: is_whole(v, 1, 2**31 - 1),
        _growth_tracker=lambda v: is_whole(v, 0, 2**31 - 2),
    ) and (rest["growth_factor"] == 1) == (rest["backoff_factor"] == 1)


def is_mended(value: Any) -> bool:
    """A JSON object of texts, as one text."""
    try:
        return is_text(value) and is_map(json.loads(value), is_text)
    except (ValueError, RecursionError):
        return False


def is_exponent(value: Any) -> bool:
    return is_whole(value, -300, 300)


def is_offset(value: Any) -> bool:
    return is_whole(value, -120, 120)


def is_format(value: Any) -> bool:
    known = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")
    return isinstance(value, str) and value in known


def is_map(value: Any, check: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value)) and all(map(check, value.values()))


def valid_plan(plan: Any) -> bool:
    if not is_dict(
        plan,
        version=lambda v: is_whole(v, 4, 4),
        format=is_format,
        loss=is_whole,
        components=lambda v: is_list(v, valid_planned) and len(v) > 0,
        active=lambda v: is_list(
            v,
            lambda cut: is_dict(
                cut, name=is_text, downstream=is_whole, upstream=is_whole, shift=is_offset,
                why=is_text,
            ),
        ),
        reasons=lambda v: is_list(v, is_text),
    ):  # fmt: skip
        return False
    exponents = [c["exponent"] for c in plan["components"]]
    count = len(exponents)
    if plan["loss"] >= count:
        return False
    near = all(abs(e - exponents[plan["loss"]]) <= 120 for e in exponents)
    return near and all(
        cut["downstream"] < count
        and cut["upstream"] < count
        and cut["shift"] == exponents[cut["upstream"]] - exponents[cut["downstream"]] != 0
        for cut in plan["active"]
    )


def valid_planned(component: Any) -> bool:
    return is_dict(
        component,
        modules=lambda v: is_list(v, is_text),
        exponent=lambda v: is_whole(v, -1000, 1000),
        interval=lambda v: is_list(v, lambda end: is_whole(end, -1000, 1000)) and len(v) == 2,
        error=lambda v: is_number(v, 0),
    )


def valid_graph(graph: Any) -> bool:
    if not is_dict(
        graph,
        components=lambda v: is_list(
            v,
            lambda c: is_dict(
                c, modules=lambda m: is_list(m, is_text), format=maybe(is_format),
                pinned=maybe(is_offset),
            ),
        ),
        cuts=lambda v: is_list(
            v,
            lambda c: is_dict(c, name=is_text, downstream=is_whole, upstream=is_whole),
        ),
        loss=is_whole,
    ):  # fmt: skip
        return False
    count = len(graph["components"])
    return (
        graph["loss"] < count
        and graph["components"][graph["loss"]]["pinned"] in (None, 0)
        and all(c["downstream"] < count and c["upstream"] < count for c in graph["cuts"])
    )


def valid_policy(policy: Any, rule: str) -> bool:
    if not is_dict(
        policy,
        rule=lambda v: v == rule,
        format=lambda v: v == "float16",
        plan=maybe(valid_plan),
        exponent=is_exponent,
        graph=maybe(valid_graph),
        component_of_parameter=lambda v: is_map(v, is_whole),
        excess=lambda v: is_whole(v, -100, 100),
        shifts=lambda v: is_list(
            v, lambda s: is_list(s, is_whole_or_negative, 2) and len(s) == 2 and s[0] >= 0
        ),
        evidence=valid_evidence,
        offsets=lambda v: is_dict(
            v,
            offsets=lambda v: is_map(v, is_offset),
            past=valid_past,
        ),
        schedule=lambda v: is_dict(
            v,
            next_probe=is_step,
            in_a_row=is_whole,
            searching=is_flag,
            unplanned=lambda v: is_list(v, is_whole_or_negative) and len(v) == 3 and v[1] >= 0,
        ),
    ):
        return False
    plan, graph = policy["plan"], policy["graph"]
    count = 0 if graph is None else len(graph["components"])
    fits = plan is None or (
        graph is not None and plan["loss"] == graph["loss"] and len(plan["components"]) == count
    )
    fits = fits and all(abs(by) <= 240 and is_step(at) for at, by in policy["shifts"])
    fits = fits and all(i < count for _, own, _ in policy["evidence"]["needs"] for i in own)
    return fits and all(i < count for i in policy["component_of_parameter"].values())


def valid_evidence(evidence: Any) -> bool:
    return is_dict(
        evidence,
        largest=maybe(is_exponent),
        below=lambda v: is_map(v, lambda bits: is_whole(bits, -600, 600)),
        probes=is_whole,
        parameters=lambda v: is_map(v, lambda bits: is_whole(bits, -600, 600)),
        unsafe=lambda v: is_list(v, is_text),
        needs=lambda v: is_list(
            v,
            lambda need: (
                isinstance(need, (list, tuple))
                and len(need) == 3
                and is_text(need[0])
                and are_components(need[1])
                and is_exponent(need[2])
            ),
        ),
    )


def are_components(value: Any) -> bool:
    return is_list(value, is_whole, 2) and len(value) > 0


def valid_past(past: Any) -> bool:
    if not isinstance(past, (list, tuple)) or len(past) != 2:
        return False
    return is_whole_or_negative(past[0]) and is_map(past[1], is_offset)


def is_whole_or_negative(value: Any) -> bool:
    return is_whole(value, -(2**53))


def valid_histogram(histogram: Any) -> bool:
    if not is_dict(
        histogram,
        counts=lambda v: is_list(
            v, lambda row: is_list(row, is_whole_or_negative, 2) and len(row) == 2
        ),
        zeros=is_whole,
        nonfinite=is_whole,
        hidden=is_whole,
    ):
        return False
    counts = histogram["counts"]
    places = [at for at, _ in counts]
    in_order = places == sorted(set(places))
    return in_order and all(is_exponent(at) and count >= 1 for at, count in counts)


def valid_tensor(tensor: Any) -> bool:
    return is_dict(
        tensor, name=is_text, components=are_components, histogram=valid_histogram,
        exponent=is_exponent, format=is_format, is_kept=is_flag, is_parameter=is_flag,
    )  # fmt: skip


def valid_cut_statistics(statistics: Any) -> bool:
    def moments(value: Any) -> bool:
        return is_dict(
            value,
            square=lambda v: is_number(v, 0),
            largest=lambda v: is_number(v, 0),
            log_mean=is_number,
            log_std=lambda v: is_number(v, 0),
        )

    return is_dict(
        statistics, name=is_text, downstream=is_whole, upstream=is_whole, format=is_format,
        gradient=maybe(moments), weight=maybe(moments), terms=is_whole, classifies=is_flag,
    )  # fmt: skip


def valid_result(result: Any) -> bool:
    if not is_dict(
        result,
        graph=valid_graph,
        tensors=lambda v: is_list(v, valid_tensor),
        component_of_parameter=lambda v: is_map(v, is_whole),
        cut_statistics=lambda v: is_list(v, valid_cut_statistics),
    ):
        return False
    count = len(result["graph"]["components"])
    return (
        all(i < count for tensor in result["tensors"] for i in tensor["components"])
        and all(i < count for i in result["component_of_parameter"].values())
        and all(p["downstream"] < count and p["upstream"] < count for p in result["cut_statistics"])
    )


def valid_pending(row: Any) -> bool:
    if not is_dict(row, record=lambda v: isinstance(v, dict), result=maybe(valid_result)):
        return False
    return is_dict(
        {"uncut": False, **row["record"]},
        step=is_step,
        exponent=lambda v: is_whole(v, -126, 127),
        largest=maybe(is_exponent),
        overflow=is_flag,
        bad_loss=is_flag,
        uncut=is_flag,
    )


def valid_adaptive(own: Any, rule: str) -> bool:
    """Any model's: of another one, the scale is taken alone."""
    if not isinstance(own, dict):
        return False
    if is_whole(own.get("version"), 1, 2):
        return True  # of another planner: nothing of it is taken
    another = own.get("model") != identity(network())
    if not is_dict(
        own,
        version=lambda v: is_whole(v, 3, 3),
        step=is_step,
        policy=lambda v: valid_policy(v, rule)
        or (another and valid_policy_of_another_kind(v)),
        pending=lambda v: is_list(v, valid_pending, 8),
        pins=lambda v: is_map(v, is_offset),
        probing=is_flag,
        overflowed=lambda v: is_list(v, is_text),
        wide=lambda v: is_list(v, is_text),
        changes=is_flag,
        model=lambda v: is_dict(v, modules=is_digest, parameters=maybe(is_digest)),
    ):  # fmt: skip
        return False
    steps = [row["record"]["step"] for row in own["pending"]]
    in_order = steps == sorted(set(steps)) and all(step < own["step"] for step in steps)
    named = another or all(name in ("", "0", "1", "2") for name in own["pins"])
    return in_order and named


def valid_policy_of_another_kind(policy: Any) -> bool:
    """Of another model nothing of the policy is taken: its rule and format do not matter."""
    if not isinstance(policy, dict) or policy.get("rule") not in ("range", "zhao2019"):
        return False
    alike = valid_policy({**policy, "rule": "range", "format": "float16"}, "range")
    return alike and is_format(policy.get("format"))


def is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef")


SHAPES = [(4, 3), (4,), (2, 4), (2,)]


def valid_masters(state: Any) -> bool:
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, (list, tuple)) or len(groups) != 1 or not isinstance(groups[0], dict):
        return False
    group = groups[0]
    numbers = {"lr": 0, "eps": 0, "weight_decay": 0}
    switches = ("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay")
    return (
        isinstance(group.get("params"), (list, tuple))
        and len(group["params"]) == 4
        and all(isinstance(p, (int, str)) and not isinstance(p, bool) for p in group["params"])
        and len(set(group["params"])) == 4
        and all(n in group and is_number(group[n], low, 3.5e38) for n, low in numbers.items())
        and all(name in group and isinstance(group[name], bool) for name in switches)
        and all(
            name in group and group[name] in (None, True, False) for name in ("foreach", "fused")
        )
        and isinstance(group.get("betas"), (list, tuple))
        and len(group["betas"]) == 2
        and all(is_number(b, 0) and b < 1 for b in group["betas"])
        and all(
            valid_entries(entries, group["params"].index(key), bool(group["amsgrad"]))
            if key in group["params"]
            else False
            for key, entries in state["state"].items()
        )
    )


def good(value: Any, shape: Any, low: float = -math.inf) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and tuple(value.shape) == tuple(shape)
        and bool(torch.isfinite(value).all())
        and bool((value >= low).all())
    )


def good_master(value: Any, place: int) -> bool:
    return good(value, SHAPES[place]) and value.dtype == torch.float32


def valid_entries(entries: Any, place: int, amsgrad: bool) -> bool:
    if not isinstance(entries, dict):
        return False
    rest = {k: v for k, v in entries.items() if k != "master"}
    if "master" in entries and not good_master(entries["master"], place):
        return False
    if not rest:
        return True
    step = rest.get("step")
    counted = good(step, (), 0) or is_number(step, 0)
    return (
        counted
        and float(step) <= 2**53
        and (not amsgrad or good(rest.get("max_exp_avg_sq"), SHAPES[place], 0))
        and good(rest.get("exp_avg"), SHAPES[place])
        and good(rest.get("exp_avg_sq"), SHAPES[place], 0)
    )


# Damage.


def paths(state: Any, path: tuple = ()) -> list[tuple]:
    """Every place in a state."""
    found = [path]
    if isinstance(state, dict):
        for key, value in state.items():
            found += paths(value, (*path, key))
    elif isinstance(state, (list, tuple)):
        for place, value in enumerate(state):
            found += paths(value, (*path, place))
    return found


def at(state: Any, path: tuple) -> Any:
    for key in path:
        state = state[key]
    return state


ODD = [
    None, True, False, 0, 1, -1, 7, 121, -121, 2**31 - 1, 2**31, -(2**31), 2**53, 2**53 + 1, 2**63,
    10**400, 0.0, 0.5, -0.5, 1.5, 1e-60, 1e300, math.inf, -math.inf, math.nan, "", "0", "8",
    "float16",
    "float32", "nan", "\x1b[31m", [], [None], [1, 2], [[1, 2]], {}, {"": 0}, {"version": 1}, (),
    torch.ones(1), torch.ones(2, 2), torch.tensor(math.nan), b"1", 3 + 4j, object, {1: 2}, {None},
]  # fmt: skip


def odd(random_: random.Random) -> Any:
    """One of ``ODD``; a copy, since what is put into a state may be damaged in its turn."""
    return copy.deepcopy(random_.choice(ODD))


def damaged(state: Any, random_: random.Random) -> Any:
    """A copy with one to three things wrong, or perhaps not."""
    state = copy.deepcopy(state)
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        path = random_.choice(paths(state))
        if not path:
            if random_.random() < 0.05:
                return odd(random_)
            continue
        holder, key = at(state, path[:-1]), path[-1]
        if isinstance(holder, tuple):
            continue
        _spoil(holder, key, random_)
    return state


def _spoil(holder: Any, key: Any, random_: random.Random) -> None:
    value, kind = holder[key], random_.randrange(6)
    if isinstance(value, torch.Tensor) and kind < 4:
        holder[key] = random_.choice(
            (value * math.nan, -value - 1, value.double(), value.half(), value.flatten()[:1], 0.0)
        )
    elif kind == 0 and isinstance(value, (int, float)) and not isinstance(value, bool):
        as_float = float(value) if abs(value) < 2**1023 else math.inf
        holder[key] = random_.choice((value + 1, value - 1, -value, value * 1000, as_float))
    elif kind == 1 and isinstance(holder, dict):
        del holder[key]
    elif kind == 2 and isinstance(holder, dict):
        holder[random_.choice(("extra", 3, "scale", "version"))] = odd(random_)
    elif kind == 3 and isinstance(value, (list, dict)):
        _cut_or_repeat(holder, key, value, random_)
    else:
        holder[key] = odd(random_)


def _cut_or_repeat(holder: Any, key: Any, value: Any, random_: random.Random) -> None:
    if isinstance(value, dict):
        holder[key] = dict(list(value.items())[: len(value) // 2])
    else:
        holder[key] = random_.choice((value[:-1], value + value, value[::-1], tuple(value)))


def changes(whole: Any, state: Any, path: tuple = ()) -> list[str]:
    """Where two states differ, and what the second has there."""
    if isinstance(whole, dict) and isinstance(state, dict):
        found = [f"{path}: without {key!r}" for key in whole if key not in state]
        for key, value in state.items():
            found += changes(whole.get(key, "nothing"), value, (*path, key))
        return found
    if isinstance(whole, list) and isinstance(state, list) and len(whole) == len(state):
        pairs = enumerate(zip(whole, state, strict=True))
        return [line for i, (one, two) in pairs for line in changes(one, two, (*path, i))]
    return [] if repr(whole) == repr(state) else [f"{path}: {state!r}"[:300]]


class _Unwritable(Exception):
    """A value that JSON does not have: as text it could not be in a state."""


def as_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, OverflowError):
        raise _Unwritable from None


def judge(target: Any, made: Any, state: Any) -> str:
    """``"accepted"``, ``"refused"``, ``"no state"`` or what is wrong."""
    before = target.everything(made)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.load(made, state)
    except _Unwritable:
        return "no state"
    except ValueError as refusal:
        words = str(refusal)
        if target.everything(made) != before:
            return f"changed on refusal: {words}"
        is_clear = "must be" in words and "got" in words
        is_clear = is_clear or "was saved with" in words or "must be modules" in words
        return "refused" if is_clear else f"unclear: {words}"
    except RuntimeError as refusal:
        return "refused" if "state dict is empty" in str(refusal) else f"unclear: {refusal!r}"
    except Exception as error:
        return f"unclear: {error!r}"
    if not target.is_valid(state):
        return "accepted though not valid"
    try:
        return "accepted" if target.works(made) else "accepted and does not load back to itself"
    except Exception as error:
        return f"accepted and failed later: {error!r}"


def outcomes(count: int, seed: int) -> tuple[collections.Counter, list[str]]:
    """``count`` damaged states over all targets; how many of each outcome, and what is wrong."""
    random_ = random.Random(seed)
    whole = {name: target.state() for name, target in TARGETS.items()}
    tally: collections.Counter = collections.Counter()
    wrong = []
    made = {name: target.fresh() for name, target in TARGETS.items()}
    names = list(TARGETS)
    done = 0
    while done < count:
        name = names[done % len(names)]
        target = TARGETS[name]
        state = damaged(whole[name], random_)
        outcome = judge(target, made[name], state)
        if outcome == "no state":
            continue
        done += 1
        tally[name, outcome.partition(":")[0]] += 1
        if outcome not in ("accepted", "refused"):
            wrong.append(f"{name}: {outcome}: {changes(whole[name], state)}")
        if outcome != "refused":
            made[name] = target.fresh()
    return tally, wrong


if __name__ == "__main__":
    amount = int(sys.argv[1]) if len(sys.argv) > 1 else 20000
    table, faults = outcomes(amount, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"{'class':40} {'refused in words':>16} {'accepted, valid':>16} {'wrong':>6}")
    for name in TARGETS:
        refused, accepted = table[name, "refused"], table[name, "accepted"]
        wrong = sum(n for (of, _), n in table.items() if of == name) - refused - accepted
        print(f"{name:40} {refused:16} {accepted:16} {wrong:6}")
    print("\n".join(fault[:1500] for fault in faults[:20]))
    sys.exit(bool(faults))
