"""Which of the caller's GPUs a pytest-xdist worker gets: one out of the list that the caller may see, no other."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence


def visible_gpus(environment: Mapping[str, str], uuids: Sequence[str]) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, as UUIDs, in its order; all of `uuids` where it is not set.

    Entries are indices into `uuids`, UUIDs (or a beginning of one), or MIG instances, which stay as they are. As CUDA
    reads it, an entry that names no GPU ends the list.
    """
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return list(uuids)
    found: list[str] = []
    for entry in (e.strip() for e in given.split(",")):
        if entry.startswith("MIG-"):
            found.append(entry)
            continue
        if re.fullmatch(r"\d+", entry):
            named = list(uuids[int(entry) : int(entry) + 1])
        else:
            named = [u for u in uuids if entry and u.startswith(entry)]
        if len(named) != 1:
            break
        found.append(named[0])
    return list(dict.fromkeys(found))


def assign(worker: str, environment: MutableMapping[str, str], uuids: Sequence[str]) -> str | None:
    """Give worker gw<i> the i-th visible GPU, in turn, by its UUID; returns it, or None where no GPU is visible.

    Must be done before CUDA is initialised. More workers than GPUs share one and wait for its lock.
    """
    gpus = visible_gpus(environment, uuids)
    number = re.search(r"\d+$", worker)
    if not gpus or number is None:
        return None
    mine = gpus[int(number[0]) % len(gpus)]
    environment["CUDA_VISIBLE_DEVICES"] = mine
    return mine
