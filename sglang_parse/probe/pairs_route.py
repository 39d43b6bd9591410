"""Pairs to train a probe on: kept in the scheduler, handed out by one endpoint.

The HTTP server asks the scheduler for its internal state under a request id of its own,
and the hook of /server_info adds the pairs. SGLang's own calls carry no such id.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_parse.judging.judges import ServerJudge
from sglang_parse.options.server import ParseConfig
from sglang_parse.probe.linear_probe import Learnt
from sglang_parse.probe.pair_collector import PairCollector
from sglang_parse.probe.target_fingerprint import fingerprint

PATH = "/parse/probe/pairs"
PAIRS_KEY = "parse_pairs"
# Pairs of one answer.
MOST_AT_ONCE = 1024
ASKED = re.compile(r"parse-pairs:(\d{1,9}):([01])")


@dataclass
class Collected:
    """The collector of this process, and what its pairs are bound to."""

    collector: PairCollector
    about: dict[str, Any]


# One a scheduler process, which serves one model.
_collected: list[Collected] = []


def open_collector(
    server_args: Any,
    config: ParseConfig,
    layers: Sequence[int],
    judge: ServerJudge,
    model_config: Any,
) -> PairCollector | None:
    """None where the server keeps no pairs. Raises ValueError where the target has no
    fingerprint."""
    _collected.clear()
    if not config.probe_collect:
        return None
    target = fingerprint(server_args.model_path, getattr(server_args, "revision", None))
    suffix = judge.ask(config.judge_suffix).suffix
    learnt = Learnt(target, config.judge_suffix, tuple(suffix), config.threshold)
    collector = PairCollector(config.probe_collect)
    about = {"learnt": asdict(learnt), "layers": list(layers)}
    about["hidden_size"] = model_config.hidden_size
    _collected.append(Collected(collector, about))
    return collector


def add_pairs(result: Any, recv_req: Any) -> None:
    """Put the pairs that a call names in its request id into the scheduler's answer."""
    found = ASKED.fullmatch(getattr(recv_req, "rid", None) or "")
    if found:
        start, clears = int(found[1]), found[2] == "1"
        result.internal_state[PAIRS_KEY] = _pairs(start, clears=clears)


def _pairs(start: int, *, clears: bool) -> dict[str, Any]:
    if not _collected:
        return {}
    one = _collected[0]
    if clears:
        one.collector.clear()
    pairs = one.collector.pairs[start : start + MOST_AT_ONCE]
    states = b"".join(pair.state.numpy().tobytes() for pair in pairs)
    return {
        **one.about,
        "total": len(one.collector.pairs),
        "seen": one.collector.num_seen,
        "states": base64.b64encode(states).decode(),
        "scores": [pair.score for pair in pairs],
        "requests": [pair.request for pair in pairs],
        "indices": [pair.index for pair in pairs],
        "segmenters": [pair.segmenter for pair in pairs],
    }


def add_pairs_route(app: Any, config: ParseConfig) -> None:
    """The endpoint, where the server keeps pairs; it takes the admin key if there is
    one, and the API key otherwise."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    if config.probe_collect:
        endpoint = auth_level(AuthLevel.ADMIN_OPTIONAL)(_hand_out)
        app.add_route(PATH, endpoint, methods=["GET", "DELETE"])


async def _hand_out(request: Any) -> Any:
    """GET ?start=N: pairs from the N-th on, of each data-parallel rank. DELETE forgets
    them all."""
    from fastapi.responses import ORJSONResponse
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import GetInternalStateReq

    start = request.query_params.get("start", "0")
    clears = request.method == "DELETE"
    if not re.fullmatch(r"\d{1,9}", start):
        told = "start is no number; expected a whole number from 0."
        return ORJSONResponse({"error": {"message": told}}, status_code=400)
    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    asked = GetInternalStateReq(rid=f"parse-pairs:{start}:{int(clears)}")
    answers = await manager.get_internal_state_communicator(asked)
    return ORJSONResponse([one.internal_state[PAIRS_KEY] for one in answers])
