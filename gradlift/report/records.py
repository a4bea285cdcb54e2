"""What happened, step by step: records, and each as a line of JSON.

Every line carries the version of its layout::

    {"gradlift": 1, "run": {...}}                  a run begins, or goes on from a checkpoint
    {"gradlift": 1, "step": 7, "scale": 256.0, ..} one step; what is not known is left out
    {"gradlift": 1, "end": true}                   the run was closed, not killed

Records come from files that anybody may have written, so ``decode`` believes nothing: each field
has one check, and a line with a value out of its range is damaged as a whole. JSON has no infinity
and no NaN; a norm or a loss that is not finite is the string ``"inf"``, ``"-inf"`` or ``"nan"``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gradlift import schema
from gradlift.formats import FORMATS, Format, get
from gradlift.schema import Since

SCHEMA = 1
KEY = "gradlift"
CAUSES = ("forward", "inf", "nan")


@dataclass(frozen=True)
class ModuleRecord:
    """What a probe saw of one module's gradient, and the exponent it was stored at."""

    name: str
    exponent: int
    """The gradient was stored multiplied by 2**exponent."""
    flushed: float
    """Share of the elements that were zero in the format; exact zeros are among them."""
    subnormal: float
    overflowed: float
    """Share that was inf or NaN."""
    low: int | None = None
    """floor(log2) of the smallest true value in sight; None if there was none."""
    tenth: int | None = None
    """A tenth of the values in sight lie below this; the three after it likewise."""
    median: int | None = None
    ninetieth: int | None = None
    high: int | None = None

    def may_have_lost(self, format: Format) -> float | None:
        """The share of zeros that the format may have made; None where nothing but zeros was seen.

        Zeros are the gradient's own, as a ReLU's are, where the smallest value in sight lies well
        above the smallest that could be seen.
        """
        if self.low is None:
            return None
        return 0.0 if self.low + self.exponent > format.min_subnormal + 3 else self.flushed


@dataclass(frozen=True)
class PlanChange:
    """A new plan, in the step it came into force."""

    summary: str
    reasons: tuple[str, ...] = ()
    active: int = 0
    """Cuts that change the exponent."""


@dataclass(frozen=True)
class StepRecord:
    """What is known of one step. None stands for what was not measured."""

    step: int
    scale: float
    """The loss scale that the step ran at."""
    skipped: bool = False
    cause: str | None = None
    """Why it was skipped: ``"forward"``, the loss was not finite before it was scaled; ``"inf"``,
    a gradient overflowed; ``"nan"``, gradients held NaNs and no inf."""
    grad_norm: float | None = None
    """Of the true gradient, before clipping."""
    clip: float | None = None
    """What clipping multiplied the gradient by, at most 1."""
    skips: int = 0
    """Steps skipped so far, this one included, and those between two records."""
    where: str | None = None
    """The first gradient with an inf or a NaN, where the host knows it."""
    modules: tuple[ModuleRecord, ...] = ()
    """In the order of the forward pass; empty but at probes."""
    plan: PlanChange | None = None
    loss: float | None = None
    """The sum of the losses that were scaled for this step, before scaling."""
    first_bad: str | None = None
    """The first tensor that was not finite, in a sentence, where it was looked for."""
    largest: int | None = None
    """floor(log2) of the largest true gradient that the loss scale follows, where it was measured:
    of the parameters; with layer-wise exponents as their components store it."""
    time: float | None = None
    """When the step ended, in seconds since 1970."""


@dataclass(frozen=True)
class Problem:
    """A line that could not be read."""

    line: int
    why: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.why}"


@dataclass(frozen=True)
class Run:
    """A file of records as it was read."""

    name: str
    records: tuple[StepRecord, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the run said of itself when it began."""
    problems: tuple[Problem, ...] = ()
    ended: bool = False
    """Whether the run was closed; a killed one was not."""
    earlier: tuple[Run, ...] = ()
    """The other runs of the file, which were begun before, in their order."""

    @property
    def all(self) -> tuple[Run, ...]:
        """The runs of the file, this one last."""
        return (*self.earlier, self)


def format_of(about: Mapping[str, Any]) -> Format:
    """The format that gradients are stored in, from what a run says of itself."""
    name = str(about.get("format"))
    return get(name if name in FORMATS else "float16")


# To a line.


def encode(record: StepRecord) -> bytes:
    """A record as a line of JSON, its end included."""
    row = {key: value for key, value in vars(record).items() if value not in (None, ())}
    if not record.skipped:
        del row["skipped"]
    if record.modules:
        rows = [vars(module).items() for module in record.modules]
        row["modules"] = [{k: v for k, v in known if v is not None} for known in rows]
    if record.plan is not None:
        row["plan"] = asdict(record.plan)
    return line_of(row)


def line_of(row: Mapping[str, Any]) -> bytes:
    """Entries as a line of this layout."""
    told = jsonable({KEY: SCHEMA, **row})
    return json.dumps(told, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def jsonable(value: Any) -> Any:
    """A value that JSON can hold: numbers that are not finite as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    return [jsonable(entry) for entry in value] if isinstance(value, (list, tuple)) else value


# From a line.


def decode(line: bytes) -> StepRecord | dict[str, Any]:
    """What a line says: a record, or the entries of a line that begins or ends a run.

    Raises:
        ValueError: the line is damaged, foreign, or of a newer layout; the message says which.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON; cut off or damaged") from None
    if not isinstance(row, dict) or KEY not in row:
        raise ValueError("no record of gradlift's")
    version = row.pop(KEY)
    if type(version) is not int or version < 1:
        raise ValueError("damaged: its version is no number")
    if version > SCHEMA:
        raise ValueError(
            f"written by a newer gradlift: it needs one that reads schema {version}, and this one "
            f"reads up to {SCHEMA}"
        )
    return schema.read(_STEP, row, "record", "the line is damaged") if "step" in row else row


def _or_not_finite(number: schema.Check, *words: str) -> schema.Check:
    """A number, or a word for one that is not finite."""
    return lambda value: float(value) if value in words else number(value)


# Wider than any format's exponents, and narrow enough to draw.
_EXPONENT = schema.whole(-5000, 5000)
_SHARE = schema.number(0.0, 1.0)
_PLAN = schema.open_record(
    make=PlanChange,
    summary=schema.text,
    reasons=Since(schema.list_of(schema.text, make=tuple), ()),
    active=Since(schema.whole(0), 0),
)
_MODULE = schema.open_record(
    make=ModuleRecord,
    name=schema.text,
    exponent=_EXPONENT,
    **dict.fromkeys(("flushed", "subnormal", "overflowed"), _SHARE),
    **dict.fromkeys(("low", "tenth", "median", "ninetieth", "high"), Since(_EXPONENT)),
)
_STEP = schema.open_record(
    make=StepRecord,
    step=schema.whole(0),
    scale=schema.number(sys.float_info.min),
    skipped=Since(schema.flag, False),
    cause=Since(schema.one_of(*CAUSES)),
    grad_norm=Since(_or_not_finite(schema.number(0.0), "inf", "nan")),
    clip=Since(_SHARE),
    skips=Since(schema.whole(0), 0),
    where=Since(schema.text),
    modules=Since(schema.list_of(_MODULE, make=tuple), ()),
    plan=Since(_PLAN),
    loss=Since(_or_not_finite(schema.number(), "inf", "-inf", "nan")),
    first_bad=Since(schema.text),
    largest=Since(_EXPONENT),
    time=Since(schema.number(0.0, 2.0**40)),
)
