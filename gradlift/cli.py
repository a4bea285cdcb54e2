"""The command ``gradlift``: diagnose, report, watch, demo.

Exit codes: 0, done; 1, it could not be done (a file that cannot be read, a function that fails);
2, the command line is wrong; 130, interrupted. A user's mistake is one line on stderr and no
traceback. Results go to stdout, everything else to stderr; colours and bars appear on a terminal
alone, and NO_COLOR is heeded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from gradlift import __version__
from gradlift.plan.evidence import TOLERANCE
from gradlift.printable import shorten
from gradlift.report.record_file import read
from gradlift.report.records import Run, jsonable

FORMATS = ("html", "md", "json", "png")


class Mistake(Exception):
    """Something to tell the user in a line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = make_parser().parse_args(argv)
    try:
        code = arguments.run(arguments) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except Mistake as mistake:
        return _fail(str(mistake))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        _close_stdout()
        return 0
    except OSError as error:  # a full disk behind stdout, a terminal that is gone
        _close_stdout()
        return _fail(f"cannot write the result: {error.strerror or error}")


def _fail(why: str) -> int:
    """Say why on stderr, in one line and with no control character of a user's."""
    with suppress(OSError, ValueError):
        print(f"gradlift: {shorten(why, 1000)}", file=sys.stderr)
    return 1


def _close_stdout() -> None:
    """Leave nothing for Python to flush at exit, where it would fail once more."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="gradlift",
        description="Loss scaling for low-precision training: see what happens to gradients.",
        epilog="Each command has its own --help with examples.",
    )
    parser.add_argument("--version", action="version", version=f"gradlift {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_diagnose(commands)
    _add_report(commands)
    _add_watch(commands)
    _add_demo(commands)
    return parser


def _command(
    commands: Any, name: str, help: str, examples: str, run: Callable[[Any], int | None]
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="print the result alone")
    parser.set_defaults(run=run)
    return parser


# Diagnose.


def _add_diagnose(commands: Any) -> None:
    parser = _command(
        commands,
        "diagnose",
        "show which gradients of a model underflow, and the error in each format",
        "  gradlift diagnose mypackage.train:make\n"
        "  gradlift diagnose train.py:make --batches 2 --json > diagnosis.json\n\n"
        "make() returns (model, loss_fn, batches); loss_fn(model, batch) returns the loss.",
        _diagnose,
    )
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="what makes model and batches")
    parser.add_argument("--batches", type=_count, metavar="N", help="look at N batches at most")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="ERROR",
        help="relative error that a gradient may have (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--traceback", action="store_true", help="show where your function failed")


def _diagnose(arguments: argparse.Namespace) -> None:
    make = load(arguments.target)
    try:
        from gradlift.torch import diagnose
    except ImportError as error:
        raise Mistake(str(error)) from None
    made = _call(make, arguments)
    if not isinstance(made, tuple) or len(made) != 3:
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise Mistake(f"{arguments.target} must return (model, loss_fn, batches), got {got}")
    model, loss_fn, batches = made
    if arguments.batches and isinstance(batches, Iterable):
        batches = islice(batches, arguments.batches)
    with _status("looking at the gradients", arguments.quiet):
        found = _call(
            lambda: diagnose(model, loss_fn, batches, tolerance=arguments.tolerance), arguments
        )
    print(json.dumps(found.to_dict(), indent=1) if arguments.json else found)


def load(target: str) -> Callable[[], Any]:
    """The function that ``package.module:function`` or ``file.py:function`` names."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise Mistake(f"{target!r} is not of the form package.module:function")
    path = Path(place)
    folder, module_name = "", place
    if place.endswith(".py"):
        if not path.is_file():
            raise Mistake(f"there is no file {place}")
        folder, module_name = str(path.absolute().parent), path.stem
    # As `python -m` would have it; the installed command has its own folder there instead.
    sys.path.insert(0, folder or os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise Mistake(f"cannot import {module_name}: {error}") from None
    except Exception as error:
        raise Mistake(f"importing {module_name} failed: {_where(error)}") from None
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = f"; it has {', '.join(known[:8])}" if known else ""
        raise Mistake(f"{module_name} has no function {name}{hint}")
    return function


def _call(function: Callable[[], Any], arguments: argparse.Namespace) -> Any:
    """What the user's code returns; its failure in a line, unless they ask for all of it."""
    try:
        return function()
    except Exception as error:
        if arguments.traceback:
            traceback.print_exc()
        raise Mistake(f"{arguments.target}: {_where(error)}") from None


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


# Report.


def _add_report(commands: Any) -> None:
    parser = _command(
        commands,
        "report",
        "make one page of one or several recorded runs",
        "  gradlift report run.jsonl\n"
        "  gradlift report before.jsonl after.jsonl -o compare.html\n"
        "  gradlift report run.jsonl --format md -o -",
        _report,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN.jsonl", help="what record_to has written")
    parser.add_argument("-o", "--output", metavar="FILE", help="report.html and so on; - is stdout")
    parser.add_argument("--format", choices=FORMATS, help="html by default")
    parser.add_argument("--json", action="store_true", help="the same as --format json -o -")


def _report(arguments: argparse.Namespace) -> None:
    from gradlift.report import page as report

    format, output = _format(arguments), arguments.output
    if arguments.json and output is None:
        output = "-"
    with _status("reading", arguments.quiet):
        runs = [_read(path) for path in arguments.runs]
        try:
            page = report.write(runs, format)
        except ValueError as error:
            raise Mistake(str(error)) from None
        except ImportError as error:
            raise Mistake(f"{error}; a report needs pip install 'gradlift[report]'") from None
    for said in [] if arguments.quiet else _left_out(runs, report.MOST_RUNS):
        print(said, file=sys.stderr)
    if output == "-":
        sys.stdout.buffer.write(page)
        sys.stdout.flush()
        return
    target = Path(output or f"report.{format}")
    try:
        target.write_bytes(page)
    except OSError as error:
        raise Mistake(f"cannot write {target}: {error.strerror}") from None
    if not arguments.quiet:
        print(target)


def _left_out(runs: Iterable[Run], most: int) -> Iterator[str]:
    """What the files hold that the report does not."""
    for last in runs:
        if len(last.all) > most:
            yield f"{shorten(last.name, 200)}: the last {most} runs are in the report"
        for run in last.all:
            if run.problems:
                first = shorten(str(run.problems[0]), 200)
                told = f"{len(run.problems)} lines could not be read, the first is {first}"
                yield f"{shorten(run.name, 200)}: {told}"


def _format(arguments: argparse.Namespace) -> str:
    """As asked for, or as the name of the output says."""
    if arguments.json:
        return "json"
    if arguments.format:
        return arguments.format
    named = Path(arguments.output or "").suffix.lstrip(".").lower()
    if named in ("", "html", "htm"):
        return "html"
    if named not in FORMATS:
        raise Mistake(
            f"{arguments.output}: a report is html, md, json or png; name the file so, or say "
            "--format"
        )
    return named


def _read(path: str) -> Run:
    try:
        return read(path)
    except OSError as error:
        raise Mistake(f"cannot read {path}: {error.strerror}") from None


# Watch.


def _add_watch(commands: Any) -> None:
    parser = _command(
        commands,
        "watch",
        "follow runs in other processes",
        "  gradlift watch run.jsonl\n  gradlift watch a.jsonl b.jsonl\n"
        "  gradlift watch run.jsonl --once --json",
        _watch,
    )
    parser.add_argument(
        "paths", nargs="+", metavar="RUN.jsonl", help="waited for if it is not there yet"
    )
    parser.add_argument("--once", action="store_true", help="look once and leave")
    parser.add_argument("--json", action="store_true", help="print the last look as JSON")


def _watch(arguments: argparse.Namespace) -> None:
    from gradlift.report import watch

    console = _console(stderr=arguments.json, quiet=arguments.quiet or arguments.json)
    for path in arguments.paths:
        if Path(path).is_dir():
            raise Mistake(f"{path} is a folder; name the file that record_to writes")
        if Path(path).suffix.lower() == ".csv":
            raise Mistake(f"{path} is a table; watch follows the JSON lines of record_to")
    try:
        views = watch.watch(arguments.paths, console, once=arguments.once)
    except PermissionError as error:
        raise Mistake(f"cannot read {error.filename}: {error.strerror}") from None
    if arguments.json:
        for view in views:
            print(json.dumps(jsonable(view.to_dict())))


# Demo.


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands,
        "demo",
        "train on digits in fp16 in six ways, and see which of them learn",
        "  gradlift demo\n  gradlift demo --steps 100 --out /tmp/demo --json",
        _demo,
    )
    parser.add_argument("--steps", type=_count, metavar="N", help="optimizer steps of each run")
    parser.add_argument(
        "--out", metavar="FOLDER", default="gradlift-demo", help="for report.html (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the tables")


def _demo(arguments: argparse.Namespace) -> None:
    try:
        from gradlift import demo
    except ImportError as error:
        raise Mistake(f"{error}; the demo needs pip install 'gradlift[demo]'") from None
    try:
        Path(arguments.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Mistake(f"cannot make the folder {arguments.out}: {error.strerror}") from None
    demo.show(Path(arguments.out), arguments.steps, quiet=arguments.quiet, as_json=arguments.json)


# What they share.


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return number


def _console(stderr: bool = False, quiet: bool = False) -> Any:
    try:
        from rich.console import Console
    except ImportError as error:
        raise Mistake(f"{error}; this needs pip install 'gradlift[report]'") from None
    return Console(stderr=stderr, quiet=quiet)


def _status(what: str, quiet: bool) -> Any:
    """A sign of life on a terminal."""
    if quiet or not sys.stderr.isatty():
        return nullcontext()
    return _console(stderr=True).status(f"{what} …")
