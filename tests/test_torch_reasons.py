"""Why passes run at the global scale."""

import warnings

import pytest

from gradlift.torch.adaptive.reasons import Reasons


def test_a_reason_is_kept_each_time_and_said_once():
    reasons = Reasons()
    with pytest.warns(UserWarning, match="the sky fell; gradients stay at the global scale"):
        reasons.say("the sky fell")
    reasons.note(None)
    assert reasons.neutral is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reasons.say("the sky fell")
    assert reasons.neutral == "the sky fell"


def test_what_holds_a_part_alone_is_no_reason_for_the_whole():
    reasons = Reasons()
    with pytest.warns(UserWarning, match="'a' is pinned"):
        reasons.warn("'a' is pinned, but never called")
    assert reasons.neutral is None
