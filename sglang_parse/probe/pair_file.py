"""Pairs to train a probe on, as a server writes them: no text, no token, bounded."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Pairs of one file; those of a 32B target take about a gigabyte.
MOST_PAIRS = 20_000


class PairFile:
    """Lines of JSON: what the pairs are bound to, then a pair each, its state in base64
    of float16."""

    def __init__(
        self, path: str, about: Mapping[str, Any], *, most: int = MOST_PAIRS
    ) -> None:
        """path: "" on ranks that write nothing. Raises OSError."""
        self.num_left = most
        self._counts: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._file = open(path, "w", encoding="utf-8") if path else None  # noqa: SIM115
        if self._file is not None:
            print(json.dumps(about), file=self._file, flush=True)

    def add(
        self,
        owner: object,
        states: Tensor,
        scores: Sequence[float],
        *,
        segmenter: str,
        rid: str,
    ) -> None:
        """states: [n, width] of any dtype. scores: of the question. owner: the request,
        whose id is rid; its verdicts are numbered from 0 on."""
        index = self._counts.get(owner, 0)
        self._counts[owner] = index + len(scores)
        if self._file is None or self.num_left <= 0:
            return
        self.num_left -= len(scores)
        limit = torch.finfo(torch.float16).max
        rows = states.detach().float().clamp(-limit, limit).to("cpu", torch.float16)
        try:
            for k, (row, score) in enumerate(zip(rows, scores, strict=True), index):
                state = base64.b64encode(row.numpy().tobytes()).decode()
                pair = {"request": rid, "index": k, "score": score, "state": state}
                print(json.dumps({**pair, "segmenter": segmenter}), file=self._file)
            self._file.flush()
        except OSError as error:
            self.num_left = 0
            logger.warning("PARSE: no more pairs are written: %s.", error)
