"""What PARSE reads of SGLang's batch and of its requests: exactly these attributes.

Sources: sglang/srt/managers/schedule_batch.py (`ScheduleBatch`, `Req`) and
sglang/srt/sampling/sampling_params.py. Nothing of SGLang is imported here, so that the
engine can be typed without it. tests/contract/test_protocols.py holds SGLang to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class RequestParameters(Protocol):
    """How a request is to be served (SGLang's `SamplingParams`)."""

    #: The request's `custom_params`, as they came.
    custom_params: Any
    #: Most tokens of the answer.
    max_new_tokens: int
    #: Least tokens of the answer, before which nothing ends it.
    min_new_tokens: int
    #: Stop strings, and stop expressions as text.
    stop_strs: Sequence[str]
    stop_regex_strs: Sequence[str]
    #: Most tokens that a match of any of them has.
    stop_str_max_len: int
    stop_regex_max_len: int
    #: Stop tokens of the request's own.
    stop_token_ids: set[int] | None
    #: Whether tokens of any kind end the answer.
    ignore_eos: bool
    #: Penalties; what SGLang takes for none is 0, 0 and 1.
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    #: Token id (as text) -> what is added to its logit.
    logit_bias: dict[str, float] | None
    #: How the answer's tokens become text.
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool


class RequestKV(Protocol):
    """The KV slots of a request."""

    #: Leading columns of its row of req_to_token that hold slots of its own.
    kv_allocated_len: int


class SchedulerRequest(Protocol):
    """One request (SGLang's `Req`)."""

    #: Its name in SGLang.
    rid: str
    #: Token ids of the prompt, and of the answer so far.
    origin_input_ids: Sequence[int]
    output_ids: list[int]
    #: How it is to be served.
    sampling_params: RequestParameters
    #: The target's tokenizer, None without one, and the size of its vocabulary.
    tokenizer: Any
    vocab_size: int
    #: Tokens that end any answer of this model.
    eos_token_ids: set[int] | None
    #: Its grammar (constrained/base_grammar_backend.py), None without one.
    grammar: Any
    #: What else it may want that PARSE cannot always serve.
    custom_logit_processor: Any
    return_logprob: bool
    return_hidden_states: bool
    input_embeds: Any
    positional_embed_overrides: Any
    #: Its images and the like, None where it is text alone.
    multimodal_inputs: Any
    #: The session it goes on from, None without one.
    session: Any
    #: Its KV slots, and whether they are kept out of the radix cache.
    kv: RequestKV
    skip_radix_cache_insert: bool
    #: What will end it at the end of this step, None if nothing does.
    to_finish: Any
    #: What ended it, and the length of its answer with the stop.
    finished_reason: Any
    finished_len: int | None
    #: Right drafts of all steps, and steps by their number of right drafts.
    spec_verify_ct: int
    spec_num_correct_drafts: int
    spec_correct_drafts_histogram: list[int]

    def finished(self) -> bool:
        """Whether the answer has ended."""


class RoundBatch(Protocol):
    """Requests that take part in one round: a batch, or some of one."""

    #: The requests, in the order of everything below.
    reqs: Sequence[SchedulerRequest]
    #: [bs] int64, their rows of req_to_token, on the device and on the host.
    req_pool_indices: Tensor
    req_pool_indices_cpu: Tensor
    #: [bs] int64, tokens with KV, on the device and on the host.
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    #: Sampling parameters by request (`SamplingBatchInfo`).
    sampling_info: Any
    #: The radix cache, which can give slots back (`BasePrefixCache`).
    tree_cache: Any
    #: Where its tensors are.
    device: Any
    #: Whether any request wants logprobs of its tokens, and what each wants.
    return_logprob: bool
    top_logprobs_nums: Sequence[int] | None
    token_ids_logprobs: Sequence[list[int] | None] | None
    #: Whether any request wants hidden states.
    return_hidden_states: bool


class SchedulerBatch(RoundBatch, Protocol):
    """A batch as the scheduler hands it to the worker (SGLang's `ScheduleBatch`)."""

    #: Whether it is a prefill or a decode step (`ForwardMode`).
    forward_mode: Any
    #: The request whose prefill goes on in a later batch, None without one.
    chunked_req: Any
    #: Per request of a prefill: cached tokens, and tokens to compute.
    prefix_lens: Sequence[int]
    extend_lens: Sequence[int]
    #: [tokens] int64, the KV slots that a prefill writes.
    out_cache_loc: Tensor
    #: Sum of `seq_lens`.
    seq_lens_sum: int
    #: Which hidden states its requests want (`CaptureHiddenMode`).
    return_hidden_states_mode: Any
