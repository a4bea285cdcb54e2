"""A run that no scale can mend says why, by itself, and a guarded one goes on."""

from __future__ import annotations

import copy
import gc
import math
import random
import warnings

import pytest
import torch
from torch import Tensor, nn

from gradlift.report import read
from gradlift.torch import AdaptiveGradScaler, ForwardGuard, GradScaler
from gradlift.torch.forward.search import FOLLOWED, FOLLOWS
from gradlift.torch.forward.watch import StepWatch
from gradlift.torch.step.update import BAD_LOSS, CONSECUTIVE, COUNTS

pytestmark = pytest.mark.filterwarnings(
    "ignore:gradlift. the loss is inf or NaN:RuntimeWarning",
    "ignore:gradlift. close to float16's largest number:RuntimeWarning",
)
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Hot(nn.Module):
    """A product that float16 cannot hold, and float32 can."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.up.weight.mul_(3e4)
            self.down.weight.mul_(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) * 1e-6


def network(hot: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Hot() if hot else nn.Tanh(), nn.Linear(8, 3))


class Run:
    def __init__(self, model: nn.Module, scaler: GradScaler, half: bool = True) -> None:
        self.model, self.scaler, self.half = model, scaler, half
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        self.losses: list[float] = []

    def loss(self, x: Tensor = X) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=self.half):
            return self.model(x).float().square().mean()

    def step(self, x: Tensor = X) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(x)
        self.losses.append(float(loss.detach()))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def over(self, batches: list[Tensor]) -> None:
        for batch in batches:
            self.step(batch)

    def steps(self, count: int, x: Tensor = X) -> None:
        self.over([x] * count)


def made(kind: type[GradScaler], model: nn.Module, **options) -> GradScaler:
    if kind is AdaptiveGradScaler:
        return AdaptiveGradScaler(model, "cpu", **options)
    return GradScaler("cpu", model=model, init_scale=256.0, **options)


BOTH = pytest.mark.parametrize("kind", [GradScaler, AdaptiveGradScaler])


@BOTH
def test_a_loss_that_is_nan_is_explained_in_the_next_step(kind: type[GradScaler]):
    model = network(hot=True)
    run = Run(model, made(kind, model))
    run.step()
    assert run.scaler.last_cause is None
    with pytest.warns(RuntimeWarning, match=r"gradlift: addmm in 1\.\w+ made .* inf of"):
        run.step()
    assert run.scaler.last_cause.name in ("1.up", "1.down")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            run.step()


@BOTH
def test_a_bad_batch_is_told_from_a_bad_model(kind: type[GradScaler]):
    model = network()
    run = Run(model, made(kind, model))
    bad = X.clone()
    bad[3, 3] = math.nan
    for _ in range(3):
        run.step()
    run.step(bad)
    with pytest.warns(RuntimeWarning, match="an input already holds 1 NaN of 128 elements"):
        run.step(bad)
    run.step()
    assert run.scaler.last_cause.kind == "input"


class Functional:
    """A model that is no module, with weights of its own."""

    def __init__(self) -> None:
        self.weight = torch.randn(8, 3, requires_grad=True)

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def parameters(self) -> list[Tensor]:
        return [self.weight]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()


@pytest.mark.parametrize(
    ("build", "spoil", "kind", "name"),
    [
        (network, lambda m: m[2].weight, "parameter", "Sequential.2.weight"),
        (normed, lambda m: m[1].running_mean, "buffer", "Sequential.1.running_mean"),
        (lambda: nn.DataParallel(network()), lambda m: m.module[0].bias, "parameter", "0.bias"),
        (Functional, lambda m: m.weight, "parameter", r"param_groups\[0\]\['params'\]\[0\]"),
    ],
    ids=["weight", "buffer", "wrapped", "no module"],
)
def test_spoiled_weights_are_no_bad_data_without_a_model(build, spoil, kind, name):
    model = build()
    run = Run(model, GradScaler("cpu"))
    run.step()
    with torch.no_grad():
        spoil(model).view(-1)[1] = math.nan
    with pytest.warns(RuntimeWarning, match=rf"gradlift: the {kind} \S*{name} already holds 1 NaN"):
        run.steps(3)
    assert run.scaler.last_cause.kind == kind


def test_spoiled_weights_of_another_model_are_no_bad_data():
    model, head = network(), nn.Linear(3, 2)
    run = Run(nn.Sequential(model, head), GradScaler("cpu", model=model))
    run.optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with torch.no_grad():
        head.weight[0] = math.nan
    with pytest.warns(RuntimeWarning, match="gradlift: a parameter already holds 3 NaN"):
        run.steps(3)
    assert run.scaler.last_cause.kind == "parameter"


def test_bad_data_that_needs_a_gradient_is_still_bad_data():
    model = network()
    run = Run(model, GradScaler("cpu"))
    with pytest.warns(RuntimeWarning, match="gradlift: an input already holds"):
        run.steps(3, (X * math.nan).requires_grad_())
    assert run.scaler.last_cause.kind == "input"


@pytest.mark.filterwarnings("ignore:gradlift. a step overflowed with the scale at its floor")
@BOTH
def test_nan_gradients_behind_a_finite_loss(kind: type[GradScaler]):
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0.0).square().sum(-1, keepdim=True).sqrt() + x

    model = nn.Sequential(nn.Linear(8, 8), Root(), nn.Linear(8, 3))
    run = Run(model, made(kind, model), half=False)
    with pytest.warns(RuntimeWarning, match="the backward of sqrt in 1 made"):
        run.steps(5)
    assert run.scaler.last_cause.kind == "backward"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("mends", [False, True])
def test_an_update_that_comes_after_the_next_forward_pass_is_not_too_late(named: bool, mends: bool):
    """As trainers with several optimizers do it; the pass after that one is watched."""
    model = network(hot=True)
    options: dict = {"forward": "mend"} if mends else {}
    if mends and not named:
        pytest.skip("a guard has a model")
    run = Run(model, GradScaler("cpu", model=model if named else None, **options))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(6):
            loss = run.loss()
            if step:
                run.scaler.update()
            run.scaler.scale(loss).backward()
            run.scaler.step(run.optimizer)
            run.optimizer.zero_grad()
    if mends:
        assert "1" in {name.partition(".")[0] for name in run.scaler.forward_guard.mended}
        assert run.scaler.skipped_steps == 2
        assert any("runs these modules mended" in str(w.message) for w in told)
    else:
        assert run.scaler.last_cause.kind == "forward"
        assert run.scaler.last_cause.name in (("1.up", "1.down") if named else ("Linear",))
        assert run.scaler.last_cause.certain


def is_looked_at(model: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("forward", [None, "mend"])
def test_steps_that_are_watched_and_turn_out_fine_leave_nothing(forward: str | None):
    model = network()
    run = Run(model, made(GradScaler, model, forward=forward))
    run.step(X * math.nan)
    run.steps(1 + FOLLOWED)
    assert run.scaler.last_cause is None
    assert run.scaler.skipped_steps == 1
    assert not is_looked_at(model)


def mixed(count: int, every: int = 4) -> list[Tensor]:
    """Batches of which every fourth takes ``Hot`` out of float16's range."""
    return [X if (number + 2) % every == 0 else X * 2.0**-12 for number in range(count)]


@BOTH
def test_what_breaks_in_some_batches_alone_is_found(kind: type[GradScaler]):
    model = network(hot=True)
    run = Run(model, made(kind, model))
    with pytest.warns(RuntimeWarning, match=r"gradlift: addmm in 1\.\w+ made .* inf of"):
        run.over(mixed(8))
    assert [math.isfinite(loss) for loss in run.losses] == [True, True, False, True] * 2
    assert run.scaler.last_cause.kind == "forward"


@BOTH
def test_what_breaks_in_some_batches_alone_is_mended(kind: type[GradScaler]):
    model = network(hot=True)
    run = Run(model, made(kind, model, forward=ForwardGuard(model, distance=0.0)))
    with pytest.warns(RuntimeWarning, match="ForwardGuard runs these modules mended"):
        run.over(mixed(16))
    assert run.scaler.skipped_steps == 1
    assert not math.isfinite(run.losses[2])
    assert all(map(math.isfinite, run.losses[3:]))
    assert not is_looked_at(model)


@pytest.mark.filterwarnings("ignore:gradlift. ForwardGuard:RuntimeWarning")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [0.07, 0.3])
def test_ranks_watch_together_whatever_their_guards_find(seed: int, rate: float):
    """A watch ends with a message over the ranks: one that is alone with it waits for ever."""
    models = [network(hot=True), network()]
    searches = [made(GradScaler, m, forward="mend")._search for m in models]
    chance, counts = random.Random(seed), [0] * COUNTS
    for _ in range(60):
        for model, search in zip(models, searches, strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = model(chance.choice([X, X * 2.0**-12])).float().sum()
            search.see_loss(loss)
        watching = {isinstance(search.under_way, StepWatch) for search in searches}
        assert len(watching) == 1
        for search in searches:
            search.end({})
            search.finding = None if search.finding is None else (None, False)
            search.conclude()
            search.end_step()
        bad, before = chance.random() < rate, list(counts)
        counts[BAD_LOSS] += bad
        counts[CONSECUTIVE] = (counts[CONSECUTIVE] + 1) * bad
        for search in searches if counts != before else ():
            search.consider(list(counts))
    for search in searches:
        search.stop()


@pytest.mark.parametrize("forward", [None, "mend"])
def test_nothing_is_looked_at_while_a_graph_is_captured(forward: str | None, monkeypatch):
    model = network(hot=True)
    run = Run(model, made(GradScaler, model, forward=forward))
    run.step()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        for place in ("watch", "guard"):
            patch.setattr(f"gradlift.torch.forward.{place}.is_captured", lambda: True)
        patch.delattr("gradlift.torch.forward.guard._largest")
        run.step()
    with pytest.warns(RuntimeWarning, match="gradlift: (addmm in 1|ForwardGuard)"):
        run.step()


def test_a_run_with_bad_batches_now_and_then_is_not_watched_for_ever():
    model = network()
    run = Run(model, made(GradScaler, model))
    rare = FOLLOWED + 4
    watched = 0
    for number in range((FOLLOWS + 3) * rare):
        run.step(X if number % rare else X * math.nan)
        watched += is_looked_at(model)
    assert run.scaler.last_cause is None
    assert FOLLOWS * FOLLOWED <= watched <= FOLLOWS * (FOLLOWED + 1) + 3 * 2


@pytest.mark.filterwarnings("ignore:gradlift:RuntimeWarning")
def test_what_was_noted_of_a_watched_step_goes_with_it():
    """Every bad batch leads to a watch, with a number for each operation of a step."""
    model = network()
    run = Run(model, made(GradScaler, model))
    for _ in range(2):
        run.steps(1, X * math.nan)
        run.steps(2 + FOLLOWED)
    gc.collect()
    assert not any(type(thing) is StepWatch for thing in gc.get_objects())


def test_a_look_ends_with_its_scaler():
    """Hooks that stay would wait for other ranks, which do not look."""
    model = network()
    run = Run(model, made(GradScaler, model, forward="mend"))
    run.step(X * math.nan)
    assert any(m._forward_hooks for m in model.modules())
    del run
    gc.collect()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("same_guard", [False, True])
def test_a_new_scaler_ends_the_look_of_one_that_is_still_held(same_guard):
    model = network()
    guard = ForwardGuard(model)
    old = Run(model, made(GradScaler, model, forward=guard))
    old.step(X * math.nan)
    assert any(m._forward_hooks for m in model.modules())
    new = Run(model, made(GradScaler, model, forward=guard if same_guard else "mend"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    new.step(X * math.nan)
    assert any(m._forward_hooks for m in model.modules())
    new.step()
    old.step()


def test_a_healthy_run_is_watched_never_and_ends_at_the_same_bits():
    model, plain = network(), network()
    run = Run(model, GradScaler("cpu", model=model, forward="mend"))
    other = Run(plain, torch.amp.GradScaler("cpu"))
    for _ in range(200):
        run.step()
        other.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not run.scaler.forward_guard.mended


@pytest.mark.filterwarnings("ignore:gradlift. an input already holds:RuntimeWarning")
def test_an_evaluation_between_two_steps_is_not_watched():
    model = network()
    run = Run(model, made(GradScaler, model))
    run.step(X * math.nan)
    with torch.no_grad():
        model(X * math.nan)
    run.step()
    assert run.scaler.last_cause is None
    run.step(X * math.nan)
    run.step()
    run.step(X * math.nan)
    scaler = run.scaler
    del scaler, run
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def compiler_stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


QUIET = pytest.mark.filterwarnings(
    "ignore:gradlift:RuntimeWarning",
    # The compiler's own: of tensors between graphs, and of the hooks of a search without a model.
    "ignore:The .grad attribute",
    "ignore:Using `torch.compile.module",
)


class Pair:
    """A generator and a discriminator, compiled, each with a scaler of its own."""

    def __init__(self, named: bool, kind: type[GradScaler] = GradScaler) -> None:
        self.models = nn.Linear(4, 4), nn.Linear(4, 1)
        self.calls = [torch.compile(model, backend="aot_eager") for model in self.models]
        if kind is AdaptiveGradScaler:
            self.scalers = [kind(call, "cpu") for call in self.calls]
        else:
            names = self.calls if named else (None, None)
            self.scalers = [kind("cpu", model=model) for model in names]
        self.optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in self.models]

    def step(self, x: Tensor) -> None:
        make, judge = self.calls
        losses = lambda: judge(make(x)).mean(), lambda: judge(make(x).detach()).mean()
        for loss, scaler, optimizer in zip(losses, self.scalers, self.optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss()).backward()
            scaler.step(optimizer)
        for scaler in self.scalers:
            scaler.update()


@QUIET
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", ["named", "unnamed", "adaptive"])
def test_two_scalers_that_search_at_once_leave_the_compiler_as_it_was(kind: str):
    adaptive = AdaptiveGradScaler if kind == "adaptive" else GradScaler
    pair = Pair(kind == "named", adaptive)
    x = torch.randn(8, 4)
    for batch in (x, x * math.nan, x * math.nan, x, x, x):
        pair.step(batch)
    assert compiler_stance() == "default"
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert all(scaler.last_cause is not None for scaler in pair.scalers)


@QUIET
@pytest.mark.usefixtures("fresh_compiler")
def test_a_search_that_an_error_ends_leaves_the_compiler_as_it_was():
    pair = Pair(named=False)
    pair.step(torch.full((8, 4), math.nan))
    assert compiler_stance() == "force_eager"
    with pytest.raises(RuntimeError, match="shapes"):
        pair.step(torch.randn(8, 5))
    pair.scalers.pop(0)
    assert compiler_stance() == "force_eager"
    pair.scalers.clear()
    assert compiler_stance() == "default"
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


@BOTH
@pytest.mark.parametrize("forward", [None, "mend"])
def test_a_search_begins_again_when_a_live_scaler_loads_a_state(kind, forward):
    model = network(hot=True)
    run = Run(model, made(kind, model, forward=forward))
    saved = copy.deepcopy(run.scaler.state_dict())
    for _ in range(3):
        match = "ForwardGuard runs" if forward else "made .* inf of"
        with pytest.warns(RuntimeWarning, match=f"gradlift: .*{match}"):
            run.steps(2)
        run.scaler.load_state_dict(saved)
        assert not is_looked_at(model)
    run.step()
    run.scaler.load_state_dict(saved)
    assert not is_looked_at(model)
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


@BOTH
def test_a_guard_mends_and_training_goes_on(kind: type[GradScaler]):
    model = network(hot=True)
    run = Run(model, made(kind, model, forward="mend"))
    run.step()
    with pytest.warns(RuntimeWarning, match="ForwardGuard runs these modules mended"):
        run.step()
    for _ in range(10):
        run.step()
    assert run.scaler.skipped_steps == 1
    assert all(map(math.isfinite, run.losses[1:]))
    exact = Run(network(hot=True), GradScaler("cpu"), half=False)
    for _ in range(12):
        exact.step()
    assert run.losses[-1] == pytest.approx(exact.losses[-1], rel=0.02)


@BOTH
def test_what_was_mended_is_in_the_state(kind: type[GradScaler]):
    model = network(hot=True)
    run = Run(model, made(kind, model, forward="mend"))
    with pytest.warns(RuntimeWarning, match="ForwardGuard"):
        run.steps(2)
    state = copy.deepcopy(run.scaler.state_dict())
    other = network(hot=True)
    again = Run(other, made(kind, other, forward="mend"))
    again.scaler.load_state_dict(state)
    assert again.scaler.forward_guard.mended == run.scaler.forward_guard.mended
    again.step()
    assert math.isfinite(again.losses[0])
    bare = network(hot=True)
    with pytest.warns(RuntimeWarning, match="this scaler has no guard"):
        made(kind, bare).load_state_dict(state)


def test_a_guard_that_cannot_help_leaves_the_word_to_the_cause():
    model = network()
    run = Run(model, GradScaler("cpu", model=model, forward=ForwardGuard(model)))
    bad = X * math.inf
    with pytest.warns(RuntimeWarning, match="an input already holds"):
        run.steps(6, bad)
    assert not run.scaler.forward_guard.mended


def test_explain_looks_at_once_and_leaves_gradients_alone():
    model = network(hot=True)
    run = Run(model, GradScaler("cpu", model=model))
    cause = run.scaler.explain(run.loss)
    assert cause.overflowed
    assert cause is run.scaler.last_cause
    assert all(p.grad is None for p in model.parameters())
    healthy = Run(network(), GradScaler("cpu"))
    with pytest.raises(ValueError, match="explain needs the model"):
        healthy.scaler.explain(healthy.loss)
    with pytest.raises(ValueError, match="a function that returns the loss"):
        run.scaler.explain(lambda: 3.0)
    for given in (run.loss(), 3.0, nn.MSELoss(), None):
        with pytest.raises(
            ValueError, match=r"runs the forward pass and returns the loss, such as"
        ):
            run.scaler.explain(given)


def test_the_cause_and_the_loss_are_in_the_records(tmp_path):
    model = network(hot=True)
    run = Run(model, made(GradScaler, model))
    with run.scaler.record_to(tmp_path / "run.jsonl"), pytest.warns(RuntimeWarning, match="addmm"):
        run.steps(8)
    records = read(tmp_path / "run.jsonl").records
    assert [r.cause for r in records] == ["forward"] * 8
    assert "in 1." in str(records[1].first_bad)
    assert records[0].first_bad is None
    assert math.isnan(records[0].loss) or math.isinf(records[0].loss)


def test_records_go_on_where_the_checkpoint_was(tmp_path):
    path = tmp_path / "run.jsonl"
    model = network()
    run = Run(model, made(GradScaler, model))
    recorder = run.scaler.record_to(path)
    for _ in range(10):
        run.step()
        if len(run.losses) == 6:
            state = run.scaler.state_dict()
    del recorder
    again = Run(model, made(GradScaler, model))
    again.scaler.load_state_dict(state)
    with again.scaler.record_to(path):
        for _ in range(2):
            again.step()
    assert [r.step for r in read(path).records] == list(range(8))
    with again.scaler.record_to(tmp_path / "own.jsonl", step=1000):
        again.step()
    assert read(tmp_path / "own.jsonl").records[0].step == 1000


@pytest.mark.parametrize("forward", ["float32", 3, True])
def test_a_word_that_is_none(forward: object):
    with pytest.raises(ValueError, match="forward must be"):
        GradScaler("cpu", model=network(), forward=forward)
    with pytest.raises(ValueError, match="needs the model"):
        GradScaler("cpu", forward="mend")


def test_an_output_close_to_the_edge_is_said_before_it_breaks():
    model = network()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8) * 1e4)
    run = Run(model, AdaptiveGradScaler(model, "cpu"))
    with pytest.warns(RuntimeWarning, match=r"65504: the output of 0 \(up to \d"):
        run.step(X.clamp(-3.0, 3.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.steps(5, X.clamp(-3.0, 3.0))


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:gradlift. no output"
)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("kind", ["dynamic", "mend", "adaptive"])
def test_looking_at_nested_tensors_breaks_no_step(kind: str, layout: torch.layout) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    if kind == "adaptive":
        scaler: GradScaler = AdaptiveGradScaler(model, "cpu")
    else:
        forward = "mend" if kind == "mend" else None
        scaler = GradScaler("cpu", 2.0**40, backoff_factor=2.0**-4, model=model, forward=forward)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradlift: the backward of", RuntimeWarning)
        for step in range(9):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = model(torch.nested.nested_tensor([X[:3], X[3:8]], layout=layout))
            padded = torch.nested.to_padded_tensor(out, 0.0).float()
            # A bad loss makes the guard look, three overflows in a row the watch.
            loss = padded.square().mean() * (math.nan if step == 5 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not bool(scaler.last_step_skipped)
    assert kind == "adaptive" or scaler.skipped_steps >= 4
