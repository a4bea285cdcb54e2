"""Why backward passes run at the global scale, each reason said once."""

from __future__ import annotations

from gradlift.troubleshooting import warn

NOT_ITS_OWN = (
    "the graph of the loss has no parameter of the watched model, the one given to the scaler (a "
    "copy of it, or inside torch.func, the parameters are others)"
)
NO_OUTPUT = (
    "no output of the model's modules is in the graph of the loss, which uses the parameters "
    "directly or through TorchScript"
)
GLOBAL = "gradients stay at the global scale"
BLIND = "nothing can be measured there, and that part has the loss scale"


class Reasons:
    """What keeps gradients at the global scale."""

    def __init__(self) -> None:
        self.neutral: str | None = None
        """Why the last armed graph or backward pass ran at the global scale throughout."""
        self._said: set[str] = set()

    def note(self, reason: str | None) -> None:
        """Why the pass at hand runs neutral, if it does; nothing is said of it."""
        self.neutral = reason

    def say(self, reason: str, so: str = GLOBAL) -> None:
        """The pass at hand runs neutral for a reason that the user should know."""
        self.neutral = reason
        self._warn_once(reason, f"{reason}; {so}")

    def warn(self, reason: str) -> None:
        """A part of the graph stays at the global scale."""
        self._warn_once(reason, reason)

    def _warn_once(self, reason: str, sentence: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            warn(
                f"gradlift: {sentence}",
                "gradients-stay-at-the-global-scale",
                UserWarning,
            )
