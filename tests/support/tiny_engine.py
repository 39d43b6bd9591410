"""A real scheduler of SGLang with PARSE, without HTTP, for models of a few kilobytes.

The scheduler is forked from the process that has imported SGLang for warm servers; the
test is its tokenizer and detokenizer.
"""

import contextlib
import itertools
import json
import os
import signal
import tempfile
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import zmq

from sglang_parse.demo.servers import free_port
from tests.support.warm_servers import the_nursery

START_SECONDS = 180
SEND_MS = 20_000
ANSWER_SECONDS = 120
CHILD = "tests.support.tiny_engine_child"
SHOW_ALL_ENV = "SGLANG_PARSE_TEST_SHOW_ALL"
#: Whether models with sparse attention are served, with torch for SGLang's kernels.
SPARSE_ENV = "SGLANG_PARSE_TEST_SPARSE"


@dataclass
class Answer:
    """What one request got."""

    ids: list[int] = field(default_factory=list)
    cached: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    reason: dict[str, Any] | None = None
    logprobs: list[list[float]] = field(default_factory=list)
    retractions: int = 0


class TinyEngine:
    """Schedulers of one engine. Close it.

    wait: whether it is to serve at once. If not, call `wait` before it is asked.
    """

    def __init__(
        self,
        argv: list[str],
        *,
        num_ranks: int = 1,
        log: str,
        environment: dict[str, str] | None = None,
        wait: bool = True,
    ):
        self.numbers = itertools.count()
        self.log = log
        nursery = the_nursery()  # it imports while this process does
        ports = open_ports()
        context = zmq.Context()
        started = f"{ports['rpc_ipc_name']}-started"
        self.started = context.socket(zmq.PULL)
        self.started.bind(started)
        self.sockets = Sockets(ports, context)
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self.children = [
            nursery.fork(
                [CHILD, json.dumps([argv, ports, rank, started])], env, f"{log}{rank}"
            )
            for rank in range(num_ranks)
        ]
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until it serves. RuntimeError: it could not start."""
        deadline = time.monotonic() + START_SECONDS
        try:
            for _ in self.children:
                while not self.started.poll(200):
                    self.check()
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"the engine did not start; see {self.log}*")
                self.started.recv()
        except RuntimeError:
            self.close()
            raise

    def run(self, prompts, concurrency=1, *, abort_after=None, **options):
        """Answers in the order of the prompts; `options` as for `request`.

        options may hold lists with one entry a prompt under `each`.
        """
        each = options.pop("each", [{}] * len(prompts))
        waiting = [
            (i, p, {**options, **e})
            for i, (p, e) in enumerate(zip(prompts, each, strict=True))
        ]
        running: dict[str, int] = {}
        answers = [Answer() for _ in prompts]
        while waiting or running:
            while waiting and len(running) < concurrency:
                i, prompt, wanted = waiting.pop(0)
                rid = f"r{next(self.numbers)}"
                running[rid] = i
                self.sockets.send(request(rid, prompt, **wanted))
            for rid, one in self.sockets.outputs(self.check, ANSWER_SECONDS):
                if rid not in running:
                    continue  # it was aborted, and both ends say so
                answer = answers[running[rid]]
                take(answer, one)
                if answer.reason is not None:
                    del running[rid]
                elif abort_after is not None and len(answer.ids) >= abort_after:
                    self.sockets.send(abort(rid))
        return answers

    def check(self) -> None:
        for child in self.children:
            if child.poll() is not None:
                raise RuntimeError(f"the engine ended; see {self.log}*")

    def flush(self) -> None:
        """Empty the radix cache. SGLang refuses while requests are running, and an
        answer is here before its request has left the scheduler."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        for _ in range(100):
            self.sockets.send(FlushCacheReqInput())
            if self.sockets.reply(self.check, ANSWER_SECONDS).success:
                return
            time.sleep(0.1)
        raise RuntimeError("requests are still running")

    def close(self) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self.sockets.close()


def open_ports() -> dict[str, Any]:
    """Fields of SGLang's PortArgs."""
    folder = tempfile.mkdtemp(prefix="parse-tiny-")
    names = ("tokenizer", "scheduler_input", "detokenizer", "rpc", "metrics")
    return {
        **{f"{name}_ipc_name": f"ipc://{folder}/{name}" for name in names},
        "nccl_port": free_port(),
        "tokenizer_worker_ipc_name": None,
        "decoupled_spec_ipc_config": None,
        "instance_id": os.path.basename(folder)[-8:],
    }


def request(
    rid, prompt, *, custom=None, mm=None, token_ids=None, stream=False, **params
):
    """A request as SGLang's tokenizer sends it. token_ids: wanted log-probabilities."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(
        **{
            "temperature": 0.0,
            "max_new_tokens": 32,
            "ignore_eos": True,
            "custom_params": custom,
            **params,
        }
    )
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=mm,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=token_ids is not None,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=token_ids,
        stream=stream,
    )


def abort(rid):
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid=rid)


def take(answer: Answer, one: dict[str, Any]) -> None:
    answer.ids += one["ids"]
    answer.cached = one["cached"]
    answer.reason = one["reason"]
    answer.retractions = one["retractions"]
    if one["report"]:
        answer.report = one["report"]
    answer.logprobs += one["logprobs"]


class Sockets:
    """The test's ends of the scheduler's sockets."""

    def __init__(self, ports, context):
        from sglang.srt.utils.network import get_zmq_socket

        self.context = context
        self.to_scheduler = get_zmq_socket(
            context, zmq.PUSH, ports["scheduler_input_ipc_name"], True
        )
        self.from_scheduler = get_zmq_socket(
            context, zmq.PULL, ports["detokenizer_ipc_name"], True
        )
        self.to_tokenizer = get_zmq_socket(
            context, zmq.PULL, ports["tokenizer_ipc_name"], True
        )
        # A scheduler that has ended takes nothing more; a test must not wait for it.
        self.to_scheduler.setsockopt(zmq.SNDTIMEO, SEND_MS)
        self.seen: dict[str, int] = {}

    def send(self, what) -> None:
        from sglang.srt.managers.io_struct import sock_send

        sock_send(self.to_scheduler, what)

    def reply(self, check, seconds):
        """The next answer to a command; what is told of aborted requests is not."""
        while True:
            told = self._receive(self.to_tokenizer, check, seconds)
            if type(told).__name__ != "AbortReq":
                return told

    def outputs(self, check, seconds):
        """(request id, what it got) of one message."""
        poller = zmq.Poller()
        poller.register(self.from_scheduler, zmq.POLLIN)
        poller.register(self.to_tokenizer, zmq.POLLIN)
        for _ in range(seconds):
            ready = dict(poller.poll(1000))
            if self.to_tokenizer in ready:
                told = self._receive(self.to_tokenizer, check, 1)
                if type(told).__name__ == "AbortReq" and told.rid:
                    reason = told.finished_reason or {"type": "abort"}
                    return [(told.rid, self._nothing(reason))]
            if self.from_scheduler in ready:
                message = self._receive(self.from_scheduler, check, 1)
                if type(message).__name__ == "BatchTokenIDOutput":
                    return list(self._split(message))
            check()
        raise RuntimeError("the engine did not answer")

    def _nothing(self, reason):
        return {
            **{"ids": [], "cached": 0, "reason": reason, "retractions": 0},
            **{"report": {}, "logprobs": []},
        }

    def _receive(self, socket, check, seconds):
        from sglang.srt.managers.io_struct import sock_recv

        for _ in range(seconds):
            if socket.poll(1000):
                return sock_recv(socket)
            check()
        raise RuntimeError("the engine did not answer")

    def _split(self, message):
        reports = unwrap(message.customized_info).get("parse", [])
        for i, rid in enumerate(message.rids):
            total = message.completion_tokens[i]
            new = total - self.seen.get(rid, 0)
            self.seen[rid] = total
            ids = list(message.decode_ids[i])
            report = reports[i] if i < len(reports) else []
            logprobs = message.output_token_ids_logprobs_val
            retractions = message.retraction_counts
            yield (
                rid,
                {
                    "ids": ids[len(ids) - new :] if new else [],
                    "cached": message.cached_tokens[i],
                    "reason": message.finished_reasons[i],
                    "retractions": retractions[i] if retractions else 0,
                    "report": report[0] if report else {},
                    "logprobs": list(logprobs[i] or []) if logprobs else [],
                },
            )

    def close(self) -> None:
        self.context.destroy(linger=0)


def unwrap(info) -> dict[str, Any]:
    if info is None or isinstance(info, dict):
        return info or {}
    from sglang.srt.managers.io_struct import unwrap_from_pickle

    return unwrap_from_pickle(info) or {}
