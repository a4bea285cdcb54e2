"""One cause out of those that several ranks found."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import torch

from gradlift.torch.forward.cause import Cause
from gradlift.torch.ranks.groups import Ranks


def first_of(found: Cause | None, ranks: Ranks, device: torch.device) -> Cause | None:
    """What the first rank that found something found, told to all of them.

    Args:
        found: what this rank did.
        ranks: who they are; each of them calls this.
        device: where their messages travel.
    """
    text = b"" if found is None else json.dumps(asdict(found)).encode()
    sizes = torch.zeros(ranks.size, dtype=torch.int64, device="cpu")
    sizes[ranks.me] = len(text)
    sizes = sizes.to(device)
    ranks.reduce_(sizes)
    known = sizes.tolist()
    first = next((place for place, size in enumerate(known) if size), None)
    if first is None:
        return None
    mine = list(text) if first == ranks.me else [0] * known[first]
    told = torch.tensor(mine, dtype=torch.int32, device="cpu").to(device)
    ranks.reduce_(told)
    heard = json.loads(bytes(told.tolist()))
    cause = Cause(**{**heard, "shape": tuple(heard["shape"])})
    return replace(cause, rank=ranks.members[first])
