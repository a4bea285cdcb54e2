"""Every code block of docs/jax.md runs as it is printed, one after the other."""

# ruff: noqa: E402

import re
from pathlib import Path

import pytest

for module in ("jax", "optax", "flax"):
    pytest.importorskip(module)

import jax.numpy as jnp

PAGE = Path(__file__).parent.parent / "docs" / "jax.md"


def test_the_page_runs_as_printed(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 11
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/jax.md, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"loss 0\.\d+ at scale \d", printed)
    assert "float16, loss scale 2^" in printed
    assert names["params"]["w"].dtype == jnp.float32
    assert names["scaler"].plan is not None
    assert names["traced"].neutral == {}
