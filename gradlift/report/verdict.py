"""A run in two or three sentences, as a person would say them.

The page opens with them, the live view ends with them, and a run that fails is named by its
cause: which steps, why, where it began, and what helps.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from gradlift.printable import shorten
from gradlift.report.summary import STUCK, WORTH_A_WORD, ModuleSummary, Skips, Summary

# The loss of a run with fewer steps is not reported.
MANY = 20

_WHY = {
    "forward": "the loss was NaN or infinite before it was scaled",
    "inf": "a gradient overflowed",
    "nan": "gradients held NaNs",
    "unknown": "the cause is not known",
}
_HELP = {
    "forward": "No loss scale can help there: look at the forward pass and the data.",
    "inf": "A lower scale did not help, so the gradients themselves are infinite: look at the "
    "backward pass of that part, and at its inputs.",
    "nan": "No loss scale makes a NaN: look for 0/0, inf - inf or the square root of 0 in that "
    "part.",
    "unknown": "",
}


@dataclass(frozen=True)
class Verdict:
    """What to think of a run."""

    level: str
    """``"good"``, ``"fair"`` (something to know) or ``"bad"`` (something to do)."""
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.sentences)


def judge(summary: Summary) -> Verdict:
    """The verdict on a run."""
    stuck = stuck_at_the_end(summary)
    frequent = summary.skipped > 0.05 * _span(summary)
    if stuck:
        skips = _about_stuck(summary, stuck)
    else:
        skips = [_about_skips(summary), _about_place(summary) if frequent else ""]
    modules, hurt = ([], False) if stuck else _about_modules(summary)
    rest = [] if stuck else [_about_the_loss(summary)]
    if summary.problems:
        rest.append(f"{summary.problems:,} lines could not be read.")
    level = "bad" if stuck else "fair" if hurt or frequent else "good"
    return Verdict(level, tuple(s for s in (*skips, *modules, *rest) if s))


def stuck_at_the_end(summary: Summary) -> Skips | None:
    """The skipped steps that the run ends with, if there are many."""
    last = summary.skips[-1] if summary.skips else None
    return last if last and last.last == summary.last_step and last.count >= STUCK else None


def why(cause: str) -> str:
    """A cause of a skip in words."""
    return _WHY.get(cause, _WHY["unknown"])


def _about_stuck(summary: Summary, stuck: Skips) -> list[str]:
    found = [
        f"Skipped {summary.skipped:,} of {_span(summary):,} steps: every one since step "
        f"{stuck.first:,}, because {why(stuck.cause)}."
    ]
    if stuck.first_bad:
        found.append(f"First bad tensor: {shorten(stuck.first_bad, 300)}.")
    elif stuck.where:
        found.append(f"The first gradient that shows it: {shorten(stuck.where, 80)}.")
    if stuck.cause == "inf" and stuck.scale_last < stuck.scale_first:
        found.append(
            f"The scale fell from {power(stuck.scale_first)} to {power(stuck.scale_last)}."
        )
    return [*found, _HELP.get(stuck.cause, "")]


def _about_skips(summary: Summary) -> str:
    if not summary.skipped:
        return "No step was skipped."
    counted = dict(summary.causes)
    told = [f"{count:,} because {why(cause)}" for cause, count in counted.items()]
    unrecorded = summary.skipped - sum(counted.values())
    if unrecorded:
        told.append(f"{unrecorded:,} between two records")
    last = summary.skips[-1].last if summary.skips else None
    ended = f"; the last at step {last:,}" if last is not None else ""
    return (
        f"Skipped {summary.skipped:,} of {_span(summary):,} steps "
        f"({summary.skipped / _span(summary):.1%}): {', '.join(told)}{ended}."
    )


def _about_place(summary: Summary) -> str:
    """Where the skips began."""
    found = [skips.first_bad for skips in summary.skips if skips.first_bad]
    if found:
        return f"First bad tensor, when it was last looked for: {shorten(found[-1], 300)}."
    places = Counter(skips.where for skips in summary.skips if skips.where)
    if not places:
        return ""
    return f"The gradient that showed it first, mostly: {shorten(places.most_common(1)[0][0], 80)}."


def _about_the_loss(summary: Summary) -> str:
    if summary.loss_first is None or summary.loss_last is None or summary.steps < MANY:
        return ""
    return f"The loss went from {summary.loss_first:.3g} to {summary.loss_last:.3g}."


def _about_modules(summary: Summary) -> tuple[list[str], bool]:
    """Sentences on what the probes saw, and whether gradients are being lost."""
    if not summary.modules:
        return [
            "What was flushed to zero is not known, since no probe was recorded (gradlift diagnose "
            "tells it beforehand, AdaptiveGradScaler while training)."
        ], False
    dark = [m for m in summary.modules if m.last.low is None]
    if len(dark) == len(summary.modules):
        return ["The probes saw nothing but zeros."], True
    dying = [m for m in summary.modules if m.lost_last > WORTH_A_WORD]
    found = []
    if dark:
        pronoun, its = ("it is", "its") if len(dark) == 1 else ("they are", "their")
        found.append(
            f"No probe saw a gradient in {_named(dark)}: {pronoun} zero, or below what "
            f"{summary.format} can hold at {its} scale."
        )
    if dying:
        found.append(
            f"In the last probe {_named(dying)} may have lost more than {WORTH_A_WORD:.1%} of "
            f"{'its' if len(dying) == 1 else 'their'} gradient."
        )
    if found:
        return found, True
    once = [m for m in summary.modules if m.lost_until is not None]
    if once:
        until = max(m.lost_until or 0 for m in once)
        found.append(f"{_named(once)} lost gradient until step {until:,}.")
    if summary.active:
        found.append(
            f"{summary.active:,} {'cut gives' if summary.active == 1 else 'cuts give'} parts of "
            "the model exponents of their own; nothing was lost in the last probe."
        )
    else:
        found.append("One scale serves: nothing was lost in the last probe.")
    return found, False


def _named(modules: list[ModuleSummary]) -> str:
    if len(modules) == 1:
        name = modules[0].name
        return f"module {name}" if name.isdecimal() else shorten(name, 60)
    ends = f"{shorten(modules[0].name, 40)} to {shorten(modules[-1].name, 40)}"
    return f"{len(modules):,} modules ({ends})"


def _span(summary: Summary) -> int:
    return summary.last_step - summary.first_step + 1


def power(scale: float) -> str:
    """A scale as a power of two."""
    return f"2^{math.log2(scale):.4g}"
