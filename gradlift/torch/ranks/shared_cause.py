"""One cause out of those that several ranks found."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import torch

from gradlift.torch.forward.cause import Cause
from gradlift.torch.ranks.groups import Ranks


def first_of(
    found: Cause | None, late: bool, ranks: Ranks, device: torch.device
) -> tuple[Cause | None, bool]:
    """What the first rank that found something found, told to all of them; one whose own loss was
    bad before one whose gradients were, since these have been added up over the ranks. And whether
    any of them came too late to see its forward pass.

    Args:
        found: what this rank did.
        late: whether this rank did.
        ranks: who they are; each of them calls this.
        device: where their messages travel.
    """
    text = b"" if found is None else json.dumps(asdict(found)).encode()
    table = torch.zeros(ranks.size, 3, dtype=torch.int64, device="cpu")
    mark = 0 if found is None else 1 + found.in_loss
    table[ranks.me] = torch.tensor([mark, len(text), late], device="cpu")
    table = table.to(device)
    ranks.reduce_(table)
    known = table.tolist()
    first = max(range(ranks.size), key=lambda place: (known[place][0], -place))
    if not known[first][0]:
        return None, any(row[2] for row in known)
    mine = list(text) if first == ranks.me else [0] * known[first][1]
    told = torch.tensor(mine, dtype=torch.int32, device="cpu").to(device)
    ranks.reduce_(told)
    fields = json.loads(bytes(told.tolist()))
    cause = Cause(**{**fields, "shape": tuple(fields["shape"])})
    return replace(cause, rank=ranks.members[first]), False
