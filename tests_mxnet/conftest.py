"""These tests need MXNet 1.9.1, in an environment of its own: ``make test-mxnet``."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # MXNet asks numpy for names that are gone
    import mxnet  # noqa: F401
