"""These tests need MXNet 1.9.1, in an environment of its own: ``make test-mxnet``."""

import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))  # for read_traces

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # MXNet asks numpy for names that are gone
    import mxnet  # noqa: F401
