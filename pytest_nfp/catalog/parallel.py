"""The part of a model on one rank under tensor or expert parallelism, which gives the shapes that its kernels see."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pytest_nfp.catalog import Model, UnknownName


@dataclass(frozen=True, slots=True)
class Parallel:
    """tp8: every matrix is cut over 8 ranks. ep8: as tp8, but experts stay whole and a rank holds an eighth of them."""

    kind: Literal["tp", "ep"] = "tp"
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.kind}{self.ranks}"

    def share(self, value: int, what: str) -> int:
        """A dimension's part on one rank. Raises UnknownName where it can't be cut evenly."""
        if value % self.ranks:
            raise UnknownName(f"{self}: {what} {value} can't be cut over {self.ranks} ranks")
        return value // self.ranks


def parse_parallel(text: str) -> Parallel:
    """The parallelism of a text such as `tp8` or `ep8`. Raises UnknownName."""
    match = re.fullmatch(r"(tp|ep)([1-9]\d*)", text.strip().lower())
    if match is None:
        raise UnknownName(f"{text!r} is no parallelism: write tp8 (tensor parallel) or ep8 (expert parallel)")
    return Parallel("tp" if match[1] == "tp" else "ep", int(match[2]))


def on_rank(model: Model, parallel: Parallel) -> Model:
    """The model as one rank holds it, named model@tp8. Raises UnknownName where it can't be cut evenly.

    Where there are fewer KV heads than ranks, they are copied and not cut, as the frameworks do.
    """
    if parallel.ranks == 1:
        return model
    parts: dict[str, object] = {"name": f"{model.name}@{parallel}"}
    if model.dense is not None:
        parts["dense"] = model.dense.model_copy(update={"width": parallel.share(model.dense.width, "dense width")})
    if model.attention is not None:
        heads = parallel.share(model.attention.heads, "heads")
        kv_heads = 1
        if model.attention.kv_heads > parallel.ranks:
            kv_heads = parallel.share(model.attention.kv_heads, "KV heads")
        parts["attention"] = model.attention.model_copy(update={"heads": heads, "kv_heads": kv_heads})
    if model.vocabulary is not None:
        # Padded to whole ranks, as the frameworks do.
        parts["vocabulary"] = -(-model.vocabulary // parallel.ranks)
    if model.moe is not None:
        if parallel.kind == "ep":
            parallel.share(model.moe.experts, "experts")
            parts["moe"] = model.moe.model_copy(update={"expert_parallel": parallel.ranks})
        else:
            width = parallel.share(model.moe.width, "expert width")
            parts["moe"] = model.moe.model_copy(update={"width": width})
    return model.model_copy(update=parts)
