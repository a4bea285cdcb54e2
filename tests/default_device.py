"""``torch.set_default_device()`` for a test and for the processes that it starts."""

import os

import torch

_NAME = "GRADLIFT_TEST_DEVICE"
_GENERATOR = torch.Generator


class _Kind(type):
    def __instancecheck__(cls, value):
        return isinstance(value, _GENERATOR)


class _Generator(metaclass=_Kind):
    """``torch.Generator``, which does not follow the default device by itself."""

    def __new__(cls, device=None):
        return _GENERATOR(os.environ[_NAME] if device is None else device)


def use(device: str) -> None:
    os.environ[_NAME] = device
    torch.Generator = _Generator  # type: ignore[assignment]
    torch.set_default_device(device)


def end() -> None:
    del os.environ[_NAME]
    torch.Generator = _GENERATOR
    torch.set_default_device(None)


def follow() -> None:
    """In a process that a test started."""
    if _NAME in os.environ:
        use(os.environ[_NAME])


def inherited() -> dict[str, str]:
    """What such a process needs in its environment."""
    return {_NAME: os.environ[_NAME]} if _NAME in os.environ else {}
