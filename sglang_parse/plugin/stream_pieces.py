"""A stream's outputs in pieces as small as its parsers need.

A step of PARSE may give a whole answer, and SGLang's parsers of tool calls and
reasoning were written for the few tokens of other steps: given more, many of them lose
calls. So each output is cut between tokens, as if the tokens had come one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sglang.srt.utils.patch_tokenizer import decode_without_hf_kwargs

from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin.report_streamer import KEY

# Of `meta_info`: lists with an entry for each token.
TOKEN_LISTS = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
)
# Characters by which text may differ from its tokens' before a cut is not found.
SLACK = 8


def stream_pieces(obj: Any, manager: Any, config: ParseConfig) -> StreamPieces | None:
    """How the outputs of a request are cut, None where they stay whole.

    obj: GenerateReqInput as it was sent. manager: SGLang's TokenizerManager.
    """
    if not getattr(obj, "stream", False) or manager.tokenizer is None:
        return None
    params, args = obj.sampling_params, manager.server_args
    params = params[0] if isinstance(params, list) and params else params
    params = params if isinstance(params, Mapping) else {}
    custom = params.get("custom_params")
    size = custom.get("parse_stream_tokens") if isinstance(custom, Mapping) else None
    if size is None:
        size = config.stream_tokens
    size = size or bool(args.tool_call_parser or args.reasoning_parser)
    if not size:
        return None
    decode = decoder(manager.tokenizer, params)
    return StreamPieces(decode, manager.tokenizer.encode("a")[-1:], int(size), args)


def decoder(
    tokenizer: Any, params: Mapping[str, Any]
) -> Callable[[Sequence[int]], str]:
    """Token ids -> text, as SGLang's detokenizer decodes the answers of a request."""
    skip = params.get("skip_special_tokens", True)
    if not getattr(tokenizer, "is_fast", False):
        return lambda ids: str(decode_without_hf_kwargs(tokenizer, ids, skip))
    spaces = params.get("spaces_between_special_tokens", True)
    return lambda ids: str(
        tokenizer.decode(
            ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces
        )
    )


class StreamedText:
    """One answer of a stream: what was sent of it, and where its text can be cut.

    context: a token that stands for those in front of the answer.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], context: Sequence[int]
    ) -> None:
        self.decode = decode
        #: Characters and tokens that were sent.
        self.chars = self.num = 0
        #: The last tokens, and how many of them are text already.
        self._ids, self._read = list(context), len(context)
        #: Text of the last tokens that SGLang holds back for the next output.
        self.held: list[str] = []

    def cuts(self, tokens: Sequence[int], text: str) -> list[tuple[int, int]]:
        """Where new text can be cut: (tokens, characters) before each place.

        Nothing is cut within a character. Tokens count from the new ones on; of those
        before them, whose text comes only now, the last is 0. SGLang trims stops from
        the text, which has the last word.
        """
        parts = [(k + 1 - len(self.held), part) for k, part in enumerate(self.held)]
        parts += self._parts(tokens)
        found: list[tuple[int, int]] = []
        held: list[str] = []
        at = 0
        for num, part in parts:
            slack = SLACK + len("".join(held))
            place = text.find(part, at, at + slack + len(part))
            if place < 0:
                held.append(part)
                continue
            at, held = place + len(part), []
            found.append((num, at))
        self.held = held
        return found

    def _parts(self, tokens: Sequence[int]) -> Iterator[tuple[int, str]]:
        """The text of new tokens, where it is whole, and the tokens before its end."""
        before = self.decode(self._ids[: self._read])
        for num, token in enumerate(tokens, 1):
            self._ids.append(token)
            new = self.decode(self._ids)[len(before) :]
            if new and not new.endswith("\ufffd"):
                self._ids = self._ids[self._read :]
                self._read = len(self._ids)
                before = self.decode(self._ids)
                yield num, new


class StreamPieces:
    """Cuts the outputs of one request. size: tokens of a piece. context: a token that
    stands for those in front of the answer. args: SGLang's ServerArgs."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int],
        size: int,
        args: Any,
    ) -> None:
        self.decode = decode
        self.context = context
        self.size = size
        self.is_incremental = args.incremental_streaming_output
        self._choices: dict[int, StreamedText] = {}

    def split(self, output: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """One output of SGLang as several; the last has what ended the answer."""
        text, ids = output.get("text"), output.get("output_ids")
        if text is None or not ids:
            yield output
            return
        index = output.get("index", 0)
        choice = self._choices.setdefault(
            index, StreamedText(self.decode, self.context)
        )
        sent = choice.num
        first, begin = sent - len(choice.held), choice.chars
        for num, at in choice.cuts(ids[sent:], text[choice.chars :]):
            end, here = sent + num, choice.chars + at
            if end - first >= self.size and here > begin and end < len(ids):
                tokens = (max(first, sent), max(end, sent))
                yield self._piece(output, (begin, here), tokens)
                first, begin = end, here
        if begin == choice.chars:
            yield output
        else:
            tokens = (max(first, sent), len(ids))
            yield self._piece(output, (begin, len(text)), tokens)
        if not self.is_incremental:
            choice.chars, choice.num = len(text), len(ids)

    def _piece(
        self, output: dict[str, Any], chars: tuple[int, int], tokens: tuple[int, int]
    ) -> dict[str, Any]:
        """The part of an output that new characters and tokens make, behind all that
        came before where the server's outputs are not incremental."""
        num_left = len(output["output_ids"]) - tokens[1]
        if not self.is_incremental:
            chars, tokens = (0, chars[1]), (0, tokens[1])
        meta = dict(output["meta_info"])
        for name in TOKEN_LISTS:
            if isinstance(meta.get(name), list):
                meta[name] = meta[name][slice(*tokens)]
        if num_left:
            meta.pop(KEY, None)
            meta["finish_reason"] = None
            for name in ("completion_tokens", "output_token_logprobs_length"):
                if name in meta:
                    meta[name] -= num_left
            if "reasoning_tokens" in meta:
                meta["reasoning_tokens"] = min(
                    meta["reasoning_tokens"], meta["completion_tokens"]
                )
        return {
            **output,
            "text": output["text"][slice(*chars)],
            "output_ids": output["output_ids"][slice(*tokens)],
            "meta_info": meta,
        }
