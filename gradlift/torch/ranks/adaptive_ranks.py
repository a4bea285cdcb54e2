"""What the adaptive scalers of several ranks tell each other.

The adaptive policy is a pure function of its observations, so ranks that observe the same decide
the same. Observations come from three places::

    every step   whether a graph was unplanned or no cut acted, the layout of a probe (as a hash):
                 columns of the step's own agreement, no message of their own
    a probe      the counts of all rows, summed (``shared_probe``), when its turn comes DELAY
                 steps later
    an overflow  which components hold the parameters that overflowed, at the same turn

Every message is issued at a step that the agreed numbers name, whatever a rank's own graph or
its own speed: nobody waits for a message that another rank has not been told to send. A step in
which the ranks differed teaches nothing, and sends nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradlift.plan.histogram import BINS
from gradlift.torch.probe.probe import Probe
from gradlift.torch.ranks import shared_probe
from gradlift.torch.ranks.groups import Ranks
from gradlift.torch.ranks.message import ADDED, PLAN, listed
from gradlift.torch.ranks.shared_probe import Layout, Part
from gradlift.torch.step.readback import capturing
from gradlift.troubleshooting import see

# What a rank adds to its row of the agreement.
LAYOUT, UNPLANNED, UNCUT = range(ADDED)

NO_PROBE = -1

_PART_BITS = 26


class AgreedColumns(NamedTuple):
    """What the ranks told each other in a step: the largest of each column, and two more."""

    layout_high: float
    unplanned: float
    uncut: float
    layout_low: float
    disputed: float

    @property
    def probed(self) -> bool:
        """Whether the step was a probe on every rank, and counts."""
        return self.layout_low >= 0 and not self.disputed

    @property
    def alike(self) -> bool:
        """Whether the probe's rows are the same on every rank."""
        return self.layout_low == self.layout_high


class AdaptiveColumns:
    """The columns of the step under way: this rank's, and what came of all ranks'."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        """Of the probe, as it was told last."""
        self.agreed: list[Tensor] = []
        """What came of each agreement of the step: float64 [ADDED + 2] on the device."""
        self._hashed: tuple[Any, Any, int] | None = None
        self._forms: dict[Any, Tensor] = {}

    def hash_of(self, plan: Mapping[str, int], pins: Mapping[str, int]) -> int:
        """A hash of exponents by name, computed when they have changed."""
        if self._hashed is None or self._hashed[0] != plan or self._hashed[1] != pins:
            found = zlib.crc32(repr((sorted(plan.items()), sorted(pins.items()))).encode())
            self._hashed = plan, pins, found
        return self._hashed[2]

    def write(
        self, device: torch.device, probe: Probe | None, unplanned: bool, uncut: bool
    ) -> Tensor:
        """This rank's columns: float64 [ADDED].

        Args:
            device: where they are to be.
            probe: the one that the step is part of.
            unplanned: whether a graph came along that the plan was not made for.
            uncut: whether no cut acted.
        """
        self.layout = None if probe is None else Layout.of(probe)
        layout = NO_PROBE if self.layout is None else self.layout.digest()
        return self._form(device, (layout, int(unplanned), int(uncut)))

    def _form(self, device: torch.device, numbers: tuple[int, ...]) -> Tensor:
        """The numbers that the host knows, on the device; those of an ordinary step lie ready."""
        ready = self._forms.get((device, numbers))
        if ready is None and capturing(device):
            # Nothing may come from the host into a CUDA graph.
            made = partial(torch.full, (), dtype=torch.float64, device=device)
            return torch.stack([made(fill_value=number) for number in numbers])
        if ready is None:
            ready = torch.tensor(numbers, dtype=torch.float64, device=device)
            if numbers[LAYOUT] == NO_PROBE:
                self._forms[device, numbers] = ready
        return ready

    def receive(self, columns: Tensor, disputed: Tensor) -> None:
        """Take in the columns of all ranks: float64 [ranks, ADDED] on the device."""
        low = columns[:, LAYOUT].amin()
        self.agreed.append(torch.cat([columns.amax(0), torch.stack([low, disputed.to(low)])]))

    def add_to(self, row: Tensor) -> Tensor:
        """``row``, one dimension, and ``AgreedColumns`` in float64 behind it."""
        agreed, self.agreed = self.agreed, []
        whole = agreed[-1]
        if len(agreed) > 1:
            whole = torch.stack(agreed).amax(0)
            # Graphs may be armed between two optimizers' steps: only the last one saw them all.
            for place in (LAYOUT, ADDED):
                whole[place] = agreed[-1][place]
        return torch.cat([row.to(whole), whole])

    def end(self) -> Layout | None:
        """The layout that was told; the step is over, and what was agreed in it is forgotten."""
        self.agreed.clear()
        layout, self.layout = self.layout, None
        return layout


def shared(
    probe: Probe | None,
    layout: Layout,
    alike: bool,
    ranks: Ranks,
    device: torch.device,
    new: Callable[[], Probe] = Probe,
) -> Probe:
    """The probe of all ranks; every rank calls it at the same step with the same ``alike``.

    It is made of what was told in the agreement alone: what one rank has met since then, in a
    graph armed after its step, must not number its components otherwise than the others do.

    Args:
        probe: this rank's, its copy to the host under way; None if it was dropped meanwhile, for
            which the others must not wait.
        layout: as it was told in the agreement; rows added later are left out.
        alike: whether all ranks told the same layout.
        ranks: who they are.
        device: where their messages travel.
        new: makes an empty probe of this kind.
    """
    counts = torch.zeros((len(layout.rows), BINS), dtype=torch.int64, device="cpu")
    if probe is not None and probe.rows:
        counts += torch.tensor(probe.bins(), dtype=torch.int64, device="cpu")[: len(layout.rows)]
    sums = new().sums if probe is None else probe.sums
    if not alike:
        parts = gathered(shared_probe.part_of(layout, counts, sums), ranks)
        return shared_probe.merged(parts, new())
    packed = shared_probe.pack(layout, counts).to(device)
    ranks.reduce_(packed)
    for each in sums:
        each.agree(ranks.reduce_, len(layout.rows), device)
    whole = probe
    if whole is None or Layout.of(whole) != layout:
        whole = shared_probe.merged([Part(layout, [])], new())
    whole.sums = sums
    whole.set_counts(shared_probe.unpack(layout, packed.cpu()))
    return whole


def gathered(mine: Any, ranks: Ranks) -> list[Any]:
    """Any object of every rank, in the order of the members."""
    found = [(ranks.me, mine)]
    for group in ranks.groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, found, group=group)
        found = [entry for part in parts for entry in part]
    return [value for _, value in sorted(dict(found).items())]


def overflowed_anywhere(
    names: Sequence[str], owners: Mapping[str, int], ranks: Ranks, device: torch.device
) -> list[str]:
    """A parameter for each component that holds one which overflowed on some rank.

    Args:
        names: what this rank's overflow report holds: with sharded parameters its own alone.
        owners: the component of each parameter, the same on all ranks.
        ranks: who they are.
        device: where their messages travel.
    """
    count = max(owners.values(), default=-1) + 1
    if not count:
        return []
    hit = torch.zeros(count, dtype=torch.int32, device="cpu")
    for name in names:
        if name in owners:
            hit[owners[name]] = 1
    hit = hit.to(device)
    ranks.reduce_(hit)
    first = {component: name for name, component in sorted(owners.items(), reverse=True)}
    return [first[component] for component in hit.nonzero().flatten().tolist()]


def fingerprint(exponents: int, course: Any) -> int:
    """A whole number from 1 to 2**52 out of a hash of the exponents by name, and all the rest."""
    high, low = (part % 2**_PART_BITS for part in (exponents, zlib.crc32(repr(course).encode())))
    return high << _PART_BITS | low or 1  # 0 is a scaler without a plan


_PARTS = (
    "the exponents of the model's parts (its plan or its pins)",
    "the step, the next probe or the scaler's settings",
)


def plan_difference(
    rows: Sequence[Sequence[float]], ranks: Ranks, own: Sequence[str]
) -> str | None:
    """Which ranks follow another plan, and in what; None if none does.

    Args:
        rows: of all ranks in the agreement.
        ranks: who they are.
        own: what this rank has of each part, in words.
    """
    for place, name in enumerate(_PARTS):
        values = [divmod(int(row[PLAN]), 2**_PART_BITS)[place] for row in rows]
        if len(set(values)) == 1:
            continue
        usual = max(values, key=values.count)
        odd = [rank for rank, value in zip(ranks.members, values, strict=True) if value != usual]
        rest = [rank for rank in ranks.members if rank not in odd]
        return (
            f"gradlift: {name} differ between ranks: on {listed(odd)} from {listed(rest)}. No "
            f"weight has moved. On this rank, {ranks.members[ranks.me]}: {own[place]}. Call pin() "
            "and load_state_dict() with the same arguments on all ranks, at the same step"
            + see("differs-between-ranks")
        )
    return None
