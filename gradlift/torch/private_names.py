"""torch's private names on a scaler, readable and writable: frameworks know the scaler by them.

What they name is kept by parts, as here ``_scale`` by the part ``_device_scale``::

    _scale = of_part("_device_scale", "scale")
"""

from __future__ import annotations

from typing import Any


def of_part(part: str, name: str) -> Any:
    """A property that reads and writes the attribute ``name`` of a scaler's part."""

    def read(scaler: Any) -> Any:
        return getattr(getattr(scaler, part), name)

    def write(scaler: Any, value: Any) -> None:
        setattr(getattr(scaler, part), name, value)

    return property(read, write)


def of_policy(name: str) -> Any:
    """A property for one of the numbers of a scaler's policy."""

    def read(scaler: Any) -> Any:
        return getattr(scaler.policy, name)

    def write(scaler: Any, value: Any) -> None:
        scaler._change_policy(name, value)

    return property(read, write)
