"""`sgl.Engine` as a backend of SGLang programs.

SGLang 0.5.23 runs programs against servers only; an Engine has no backend interface.
Its calls also block an event loop that one thread may run, while a program has a thread
per state. Here the loop runs in a thread of its own, and calls from all others meet
in it, so that the engine batches them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any

from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.chat_template import get_chat_template, get_chat_template_by_model_path
from sglang.lang.global_config import global_config
from sglang.lang.ir import SglSamplingParams

CLOSED = "The EngineBackend is closed; read a program's results inside its with block."
_BESIDE_SAMPLING = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)


class EngineBackend(RuntimeEndpoint):
    """Answers what RuntimeEndpoint asks over HTTP from an engine in this process.

    While it is open the engine's event loop is its own: call the engine's blocking
    methods after `close()`. chat_template_name: as of RuntimeEndpoint; guessed from
    the model path without it.
    """

    def __init__(self, engine: Any, chat_template_name: str | None = None) -> None:
        BaseBackend.__init__(self)  # RuntimeEndpoint's would ask a server
        self.engine = engine
        args = engine.server_args
        self.model_info = {
            "model_path": args.model_path,
            "tokenizer_path": args.tokenizer_path or args.model_path,
        }
        self.chat_template = (
            get_chat_template(chat_template_name)
            if chat_template_name
            else get_chat_template_by_model_path(args.model_path)
        )
        self._open: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if not engine.loop.is_running():
            self._thread = threading.Thread(target=engine.loop.run_forever, daemon=True)
            self._thread.start()

    def __enter__(self) -> EngineBackend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the engine's event loop back. The engine lives on; what programs still
        wait for fails."""
        with self._lock:
            self._is_closed = True
            waiting = list(self._open)
        for future in waiting:
            future.cancel()
        if self._thread is not None:
            self.engine.loop.call_soon_threadsafe(self.engine.loop.stop)
            self._thread.join()
            self._thread = None

    def get_server_info(self) -> dict[str, Any]:
        return {"speculative_algorithm": self.engine.server_args.speculative_algorithm}

    def flush_cache(self) -> None:
        self._wait(self.engine.tokenizer_manager.flush_cache())

    def cache_prefix(self, prefix_str: str) -> None:
        data = {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}}
        self._wait(_next(self._start(data)))

    def commit_lazy_operations(self, s: Any) -> None:
        data = {"text": s.text_, "sampling_params": {"max_new_tokens": 0}}
        self._generate_http_request(s, data)

    fill_image = commit_lazy_operations

    def generate(
        self, s: Any, sampling_params: SglSamplingParams
    ) -> tuple[str, dict[str, Any]]:
        result = self._generate_http_request(s, self._body(s, sampling_params))
        return result["text"], result["meta_info"]

    def generate_stream(
        self, s: Any, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        body = self._body(s, sampling_params) | {"stream": True}
        self._add_images(s, body)
        chunks = self._start(body)
        at = 0
        while (chunk := self._wait(_next(chunks))) is not None:
            is_whole = not self.engine.server_args.incremental_streaming_output
            text = chunk["text"][at:] if is_whole else chunk["text"]
            at += len(text)
            yield text, chunk["meta_info"]

    def _body(self, s: Any, sampling_params: SglSamplingParams) -> dict[str, Any]:
        """The body of RuntimeEndpoint.generate."""
        self._handle_dtype_to_regex(sampling_params)
        beside = {key: getattr(sampling_params, key) for key in _BESIDE_SAMPLING}
        config = global_config
        return {
            "text": s.text_,
            "sampling_params": {
                "skip_special_tokens": config.skip_special_tokens_in_output,
                "spaces_between_special_tokens": (
                    config.spaces_between_special_tokens_in_out
                ),
                **sampling_params.to_srt_kwargs(),
            },
            **{key: value for key, value in beside.items() if value is not None},
        }

    def _generate_http_request(self, s: Any, data: dict[str, Any]) -> Any:
        """Used by RuntimeEndpoint.select as well."""
        self._add_images(s, data)
        return self._wait(_next(self._start(data)))

    def _start(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        """Outputs for a body of /generate."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(**body)
        outputs: AsyncIterator[Any] = self.engine.tokenizer_manager.generate_request(
            request, None
        )
        return outputs

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Raises RuntimeError if the backend is closed, now or meanwhile."""
        with self._lock:
            if self._is_closed:
                call.close()
                raise RuntimeError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(call, self.engine.loop)
            self._open.add(future)
        try:
            return future.result()
        except CancelledError as e:
            raise RuntimeError(CLOSED) from e
        finally:
            with self._lock:
                self._open.discard(future)


async def _next(outputs: AsyncIterator[Any]) -> Any:
    """The next output, None at the end."""
    return await anext(outputs, None)
