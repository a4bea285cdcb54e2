"""Reports: right numbers, every name escaped, and a page that a real browser shows."""

from __future__ import annotations

import io
import json
import math
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from rich.console import Console

from gradlift.printable import shorten
from gradlift.report import charts
from gradlift.report import page as report
from gradlift.report.record_file import assemble
from gradlift.report.records import ModuleRecord, PlanChange, Problem, Run, StepRecord, jsonable
from gradlift.report.summary import norm_curve, scale_curve, skip_marks, summarize, thin
from gradlift.report.watch import View, render, sparkline

HOSTILE = [
    "<script>alert(document.title='owned')</script>",
    "<img src=http://evil.example/x onerror=alert(1)>",
    "\"><b onmouseover='x'>&amp;",
    "$\\frac{1}{0}$",
    "```| a | b |\n# heading",
    "x" * 500,
    "שכבה.ראשונה",
    "a\u202eb\u0000c\ud800",
    "</style></svg></title>]]>",
]


def make_run(name: str, steps: int = 400, names: list[str] | None = None, seed: int = 0) -> Run:
    rng, scale, skips, records = random.Random(seed), 2.0**8, 0, []
    names = [f"layers.{i}" for i in range(12)] if names is None else names
    for step in range(steps):
        skipped = rng.random() < 0.02
        skips += skipped
        scale = scale / 2 if skipped else scale * 2 if step % 40 == 39 else scale
        modules = ()
        if step % 100 == 0:
            modules = tuple(
                ModuleRecord(
                    n, 8 + i % 9, 0.6 if step == 0 else 0.1, 0.1, 0.0, *range(-40 + i, -20 + i, 4)
                )
                for i, n in enumerate(names)
            )
        plan = PlanChange("exponents 8 to 16", ("a probe", names[0]), 2) if step == 200 else None
        cause = rng.choice(["inf", "nan", "forward"]) if skipped else None
        norm = math.nan if skipped else math.exp(rng.gauss(0, 1))
        records.append(
            StepRecord(step, scale, skipped, cause, norm, 0.5, skips, None, modules, plan)
        )
    return Run(name, tuple(records), {"scaler": "AdaptiveGradScaler", "format": "float16"})


# The numbers.


def test_a_summary_counts_what_the_records_say():
    run = make_run("one")
    summary = summarize(run)
    assert summary.steps == 400
    assert summary.skipped == sum(r.skipped for r in run.records) > 0
    assert sum(count for _, count in summary.causes) == summary.skipped
    assert summary.probes == 4
    assert [m.name for m in summary.modules] == [f"layers.{i}" for i in range(12)]
    # 0.1 are zeros that were always there; 0.5 were below 2^-33 each, and of the 0.4 that are left
    # a tenth was above 2^-28.
    gone, kept = 0.5 * 2**-33, 0.04 * 2**-28
    assert summary.modules[0].lost == pytest.approx(gone / (gone + kept))
    assert summary.modules[0].lost_last == 0
    assert summary.changes[0][0] == 200
    assert summary.best_exponent == 15 - 1 - max(m.last.high for m in summary.modules)


def test_zeros_of_a_gradient_that_lies_well_within_sight_are_its_own():
    near, far = (ModuleRecord("m", 8, 0.4, 0.0, 0.0, low, -9, -9, -9, -8) for low in (-32, -20))
    few = ModuleRecord("m", 8, 0.1, 0.0, 0.0, -32, -9, -9, -9, -8)
    gone, kept = 0.3 * 2**-33, 0.06 * 2**-9
    for last, lost in ((near, gone / (gone + kept)), (far, 0.0)):
        run = Run("x", (StepRecord(0, 1.0, modules=(few,)), StepRecord(1, 1.0, modules=(last,))))
        assert summarize(run).modules[0].lost_last == pytest.approx(lost)


def test_skips_between_two_records_are_counted():
    run = Run("x", (StepRecord(0, 8.0), StepRecord(10, 8.0, skips=4)))
    assert summarize(run).skipped == 4


def test_a_run_without_a_record_is_refused_with_the_first_problem():
    with pytest.raises(ValueError, match=r"x: there is no record to report on \(line 1: not JSON"):
        summarize(Run("x", (), {}, (Problem(1, "not JSON"),)))


def test_thinning_keeps_every_extreme():
    rng = random.Random(3)
    curve = [(i, rng.random()) for i in range(100_000)]
    curve[54_321] = (54_321, 99.0)
    curve[77_777] = (77_777, -99.0)
    kept = thin(curve, 2000)
    assert len(kept) <= 2000
    assert (54_321, 99.0) in kept
    assert (77_777, -99.0) in kept
    assert list(kept) == sorted(kept)


def test_a_curve_of_steps_keeps_its_corners_and_nothing_else():
    curve = [(i, float(i // 1000)) for i in range(5000)]
    kept = thin(curve, 2000)
    assert len(kept) == 2 * 5
    assert kept[0] == (0, 0.0)
    assert kept[-1] == (4999, 4.0)


def test_curves_leave_out_what_is_not_finite():
    run = make_run("one")
    assert all(math.isfinite(y) for _, y in norm_curve(run) + scale_curve(run))
    assert set(skip_marks(run)) <= {"inf", "nan", "forward"}
    marked = {step for marks in skip_marks(run).values() for step, _ in marks}
    assert marked == {r.step for r in run.records if r.skipped}


# What is written.


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_bytes(report.write([make_run(HOSTILE[1], names=HOSTILE), make_run("two", seed=1)]))
    return path


def test_json_and_markdown_tell_the_same():
    runs = [make_run("one"), make_run("two", seed=1)]
    told = json.loads(report.write(runs, "json"))["runs"]
    assert [t["name"] for t in told] == ["one", "two"]
    text = report.write(runs, "md").decode()
    for t in told:
        assert (
            f"| {t['name']} | AdaptiveGradScaler | 400 (0 to 399), not ended | {t['skipped']} |"
            in text
        )


def test_markdown_shows_hostile_names_as_text():
    problems = (Problem(1, "got '<img src=x onerror=alert(1)>'"),)
    run = replace(make_run("# <b>", names=HOSTILE), problems=problems)
    text = report.write([run], "md").decode()
    assert "<script" not in text
    assert "<img" not in text
    assert not [line for line in text.splitlines() if line.startswith("# h")]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    columns = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert set(columns) == {10, 8, 6, 4}, "no name opens a column of its own"


def test_the_image_is_a_png():
    assert report.write([make_run("$x^2$ שלום", names=HOSTILE)], "png").startswith(b"\x89PNG")


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="html, md, json or png, got 'pdf'"):
        report.write([make_run("one")], "pdf")


def test_the_page_holds_no_hostile_markup(page: Path):
    text = page.read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "\u202e" not in text
    assert text.count("</style>") == text.count("<style") == 11, "the page's and ten drawings'"
    assert "&lt;script&gt;" in text
    assert "שכבה" in text


def test_no_id_occurs_twice_in_a_page_of_several_runs(page: Path):
    ids = re.findall(r'\bid="([^"]+)"', page.read_text())
    assert len(ids) == len(set(ids))


def test_a_name_of_500_characters_is_cut_where_it_is_shown(page: Path):
    text = page.read_text()
    assert "x" * 500 not in text
    assert shorten("x" * 500, 80) in text


def test_names_are_shortened_to_one_line():
    assert shorten("a" * 500, 11) == "aaaaa…aaaaa"
    assert "\n" not in shorten("a\nb")
    assert "\u202e" not in shorten("a\u202eb"), "a character that turns the line around"
    assert shorten("x" * 36, 36) == "x" * 36


def test_a_run_without_probes_says_so():
    run = make_run("one")
    bare = replace(run, records=tuple(replace(r, modules=(), plan=None) for r in run.records))
    page = report.write([bare]).decode()
    assert "no probe was recorded" in page
    assert 'id="landscape0' not in page


def test_lines_that_could_not_be_read_are_told_and_no_address_is():
    run = replace(make_run("one"), problems=tuple(Problem(i, "not JSON") for i in range(1, 31)))
    page = report.write([run]).decode()
    assert "Lines that could not be read: 30" in page
    assert "line 1: not JSON" in page
    assert "and 10 more" in page
    named = set(re.findall(r"https?://[^\"'\s<]+", page))
    assert named <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "default-src 'none'" in page


def test_a_long_run_of_a_large_model_stays_below_five_megabytes():
    run = make_run("long", 100_000, [f"model.layers.{i}.attention.projection" for i in range(300)])
    assert len(report.write([run])) < 5_000_000


# Whatever a file holds.

ODD = [0, -1, 1e308, -1.79e308, 5e-324, 2**53, 10**400, math.nan, math.inf, "inf", "-inf", "nan"]
ODD += [None, True, "", "\x1b[31m\u202e\ud800<b>", [], {}, [1], {"a": 1}]
TEXTS = st.text(max_size=4)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
EXPONENTS = st.integers(-5000, 5000)
MODULES = st.fixed_dictionaries(
    {"name": TEXTS, "exponent": EXPONENTS}
    | dict.fromkeys(("flushed", "subnormal", "overflowed"), st.floats(0, 1)),
    optional=dict.fromkeys(("low", "tenth", "median", "ninetieth", "high"), EXPONENTS),
)
STEPS = st.fixed_dictionaries(
    {
        "step": st.integers(0, 30) | st.integers(0, 2**53),
        "scale": st.sampled_from([1.0, 65536.0, 2.3e-308, 1.79e308]),
    },
    optional={
        "grad_norm": FINITE | st.sampled_from(ODD),
        "loss": FINITE | st.sampled_from([1.79e308, -1.79e308, "nan", "-inf"]),
        "skipped": st.booleans(),
        "cause": st.sampled_from(["inf", "nan", "forward"]),
        "clip": st.floats(0, 1),
        "skips": st.integers(0, 2**53),
        "where": TEXTS,
        "first_bad": TEXTS,
        "time": st.floats(0, 2.0**40),
        "largest": EXPONENTS,
        "modules": st.lists(MODULES, max_size=3),
        "plan": st.fixed_dictionaries({"summary": TEXTS, "active": st.integers(0, 2**53)}),
    },
)
DAMAGED = st.dictionaries(st.sampled_from(["step", "scale", "loss", "time", "modules", "plan"]),
                          st.sampled_from(ODD))  # fmt: skip
HEADS = st.dictionaries(st.sampled_from(["from", "resumed", "scaler", "format"]),
                        st.sampled_from([*ODD, 3, False]))  # fmt: skip
LINES = STEPS | STEPS | DAMAGED | st.builds(lambda head: {"run": head}, HEADS | TEXTS)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    rows = draw(st.lists(LINES | st.just({"end": True}), max_size=30))
    held = b"".join(json.dumps({"gradlift": 1, **row}).encode() + b"\n" for row in rows)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(held)))
        held = held[:at] + draw(st.binary(max_size=4)) + held[at + draw(st.integers(0, 9)) :]
    return held


def tell(held: bytes, *formats: str) -> None:
    run = assemble("x", io.BytesIO(held))
    for format in formats if run.records else ():
        report.write([run], format)
    view = View("x")
    view.take(held.split(b"\n"))
    Console(file=io.StringIO()).print(render(view, 1e9))
    json.dumps(jsonable(view.to_dict(1e9)), allow_nan=False)


@settings(deadline=None, max_examples=300)
@given(files())
def test_no_file_of_records_is_too_odd_to_tell_of(held: bytes):
    tell(held, "md", "json")


@settings(deadline=None, max_examples=10)
@given(files())
def test_no_file_of_records_is_too_odd_to_draw(held: bytes):
    tell(held, "html", "png")


def test_losses_near_the_largest_number_are_told_and_drawn():
    run = Run("x", tuple(StepRecord(i, 2.0, loss=1.7e308, grad_norm=1.6e308) for i in range(40)))
    summary = summarize(run)
    assert summary.loss_first == summary.loss_last == pytest.approx(1.7e308)
    assert summary.norm_median == 1.6e308
    assert report.write([run])
    assert sparkline([-1.7e308, 1.7e308]) == "▁█"


def test_a_negative_norm_is_a_damaged_line():
    run = assemble("x", [b'{"gradlift":1,"step":0,"scale":2.0,"grad_norm":-1.0}\n'])
    assert run.records == ()
    assert "record['grad_norm'] must be a finite number from 0" in str(run.problems[0])


def test_the_runs_of_a_file_are_told_apart():
    runs = [make_run(f"r{i}", steps=3 + i) for i in range(3)]
    told = replace(runs[-1], earlier=tuple(runs[:-1]))
    rows = json.loads(report.write([told, make_run("other", steps=9)], "json"))["runs"]
    assert [(row["name"], row["steps"]) for row in rows] == [
        ("r0", 3), ("r1", 4), ("r2", 5), ("other", 9),
    ]  # fmt: skip


# In a browser.

CHROMIUM = (
    shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a Chromium on the PATH: apt-get install chromium"
)


def browse(page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page in headless Chromium with the network watched; its console is in stderr."""
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
            f"--user-data-dir={profile}", f"--log-net-log={profile}.net.json", *options,
            page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


@needs_chromium
def test_a_browser_shows_every_chart_and_asks_for_nothing(page: Path, tmp_path: Path):
    seen = browse(page, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" not in seen.stderr, "the console is empty"
    dom = seen.stdout
    for chart in ("timelinewide", "timelinenarrow", "landscape0wide", "landscape1narrow"):
        drawn = dom[dom.index(f'<figure id="{chart}"') :]
        drawn = drawn[: drawn.index("</figure>")]
        assert drawn.count("<path") > 20, chart
    assert "owned" not in re.findall(r"<title>(.*?)</title>", dom)[0]
    for name in HOSTILE[:3]:
        assert f"<bdi>{name}" not in dom
    net = json.loads((tmp_path / "profile.net.json").read_text())
    urls = {e["params"]["url"] for e in net["events"] if "url" in e.get("params", {})}
    asked = {url for url in urls if url.startswith(("http:", "https:", "ws:", "wss:"))}
    assert not {url for url in asked if "evil" in url}
    initiated = {url for url in urls if url.startswith("file:")}
    assert initiated <= {page.as_uri()}


@needs_chromium
@pytest.mark.parametrize("width", [390, 820, 1400])
def test_nothing_is_wider_than_the_screen(page: Path, tmp_path: Path, width: int):
    # A page that forbids scripts is measured from a page around it, by its own scroll width.
    framed = tmp_path / "frame.html"
    framed.write_text(
        f'<iframe id=f width={width} height=900 style="border:0" src="{page.as_uri()}"></iframe>'
        "<script>f.onload=()=>{const d=f.contentDocument;document.title="
        "[d.documentElement.scrollWidth,d.querySelector('.verdict').getBoundingClientRect().top,"
        "getComputedStyle(d.querySelector('.narrow')).display].join()}</script>"
    )
    seen = browse(framed, tmp_path / "profile", "--dump-dom", "--allow-file-access-from-files")
    wide, top, narrow = re.search(r"<title>([\d.]+),([\d.]+),(\w+)</title>", seen.stdout).groups()
    assert float(wide) <= width
    assert float(top) < 200, "the verdict is on the first screen"
    assert (narrow == "block") == (width <= 640), "a phone gets drawings of its own"


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_are_drawn_in_the_colours_of_the_scheme(page: Path, tmp_path: Path, scheme: str):
    from PIL import Image

    shot = tmp_path / "shot.png"
    wanted = {"dark": 0, "light": 1}[scheme]
    browse(
        page, tmp_path / "profile", f"--screenshot={shot}", "--window-size=1180,2600",
        f"--blink-settings=preferredColorScheme={wanted}",
    )  # fmt: skip
    image = Image.open(shot).convert("RGB")
    counts = {rgb: n for n, rgb in image.getcolors(1 << 24) or ()}
    colors = charts.DARK if scheme == "dark" else charts.LIGHT
    for name in ("s0", "s1", "box", "fg"):
        rgb = tuple(bytes.fromhex(colors[name][1:]))
        assert counts.get(rgb, 0) > 50, f"{name} is drawn on the {scheme} page"
    background = image.getpixel((2, 2))
    assert (sum(background) < 200) == (scheme == "dark")
