"""What reading a reply costs: `python -m benchmarks.bad_drafts.reading`.

Each case is one stream of 100 tokens, read by the thread that runs beside the scheduler
and shares its core where there is one alone. Prints milliseconds of CPU time, median
over the streams. Nothing is written.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.bad_drafts.server import CASES, draft_server
from sglang_parse.demo.servers import HOST, free_port
from sglang_parse.remote.breaker import Breaker
from sglang_parse.remote.remote_streams import RemoteStreams

TOKENS, STREAMS, LONGEST_S = 100, 7, 10.0
ANSWERS = {"Question. ": "These are the words of an answer. " * 12}


def read_ms(streams: RemoteStreams) -> float:
    """CPU time of one stream, until it is done or for LONGEST_S."""
    end, before = time.monotonic() + LONGEST_S, time.process_time()
    stream = streams.begin("Question. ", TOKENS)
    assert stream is not None
    while not stream.is_done and time.monotonic() < end:
        time.sleep(0.01)
    streams.end(stream)
    return 1e3 * (time.process_time() - before)


def tell(name: str, streams: RemoteStreams) -> None:
    times = [read_ms(streams) for _ in range(STREAMS)]
    print(f"{name:>8} {statistics.median(times):8.2f} ms", flush=True)


def main() -> None:
    port = free_port()
    with draft_server(port, ANSWERS, None) as (_, case):
        # It is never left alone here: each case is read as often as the others.
        breaker = Breaker(most=10**9)
        streams = RemoteStreams(f"http://{HOST}:{port}/v1", breaker=breaker)
        read_ms(streams)  # what is done once
        for name in CASES:
            if name in ("slow", "wrong"):
                continue  # a wait, and the same work as for right text
            case.value = list(CASES).index(name)
            tell(name, streams)
    tell("killed", streams)
    streams.close()


if __name__ == "__main__":
    main()
