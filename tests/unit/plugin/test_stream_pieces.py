"""Pieces of a stream, against SGLang's own detokenizer and parsers token by token."""

import functools
import itertools
import json
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.parser.reasoning_parser import ReasoningParser
from transformers import AutoTokenizer

from sglang_parse.embedded import TARGET_PATH
from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin.stream_pieces import stream_pieces

ARGUMENTS = {"city": "Zürich 😀", "when": {"day": [1, {"h": "a} b"}]}}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
TOOLS = [
    Tool(
        function=Function(
            name=name,
            parameters={
                "type": "object",
                "properties": {"city": {"type": "string"}, "when": {"type": "object"}},
            },
        )
    )
    for name in ("get_weather", "get_time")
]
NAMED = '{"name": "NAME", "arguments": ' + JSON + "}"
XML = "<parameter=city>Rome</parameter>"
# How models write calls, one or several; a parser also meets what others write.
FORMATS = {
    "json": "<tool_call>\n" + NAMED + "\n</tool_call>\n",
    "tool_call": "<tool_call>" + NAMED + "</tool_call>",
    "llama3": '<|python_tag|>{"name": "NAME", "parameters": ' + JSON + "}; ",
    "mistral": "[TOOL_CALLS] [" + NAMED + "]",
    "mistral2": "[TOOL_CALLS]NAME[ARGS]" + JSON,
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "NAME\n```json\n" + JSON + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>"
    + JSON
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0"
    "<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "qwen3_coder": f"<tool_call>\n<function=NAME>\n{XML}\n</function>\n</tool_call>\n",
    "glm": "<tool_call>NAME\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="city">'
    "Rome</parameter>\n</invoke>\n</minimax:tool_call>",
    "pythonic": '[NAME(city="Rome")]',
    "gemma4": '<|tool_call>call:NAME{city:<|"|>Rome<|"|>}<tool_call|>',
}
CASES = {
    "prose": "I look, {here} and <there>: 早上好 😀.",
    "one": "CALL",
    "prose, one": "Let me look. CALL",
    "one, prose": "CALL and so on",
    "two": "CALLOTHER",
    "three": "Now CALL\nOTHER\nCALL",
    "cut": "CUT",
    "reasoning": "<think>\nIt is 早 far, so\n</think>\n\nI ask. CALL",
}


def written(case: str, form: str) -> str:
    call, other = (form.replace("NAME", t.function.name) for t in TOOLS)
    text = CASES[case].replace("OTHER", other).replace("CALL", call)
    return text.replace("CUT", call[: len(call) * 2 // 3])


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET_PATH)


class Server:
    """SGLang's detokenizer, and its answers as TokenizerManager gives them."""

    def __init__(self, *, incremental=False, parser="qwen25", stream_tokens=None):
        self.tokenizer = tokenizer()
        self.server_args = SimpleNamespace(
            tool_call_parser=parser,
            reasoning_parser=None,
            incremental_streaming_output=incremental,
        )
        self.config = ParseConfig(stream_tokens=stream_tokens or 0)
        self.detokenizer = object.__new__(DetokenizerManager)
        self.detokenizer.tokenizer = self.tokenizer
        self.detokenizer.vocab_size = None
        self.detokenizer.decode_status = {}
        self.detokenizer.disable_tokenizer_batch_decode = False
        self.detokenizer.is_tool_call_parser_gpt_oss = False
        self.detokenizer.tool_close_token_ids = ()

    def outputs(self, ids, size, *, skip=False, prompt=(7, 8)):
        """An answer that comes `size` tokens at a time."""
        text, logprobs = "", []
        for at in range(0, len(ids), size):
            new, is_last = ids[at : at + size], at + size >= len(ids)
            delta = self.detokenizer._decode_batch_token_id_output(
                SimpleNamespace(
                    rids=["r"],
                    decoded_texts=[""],
                    decode_ids=[[*prompt, *new] if not at else new],
                    read_offsets=[len(prompt)],
                    finished_reasons=[{"type": "length"} if is_last else None],
                    no_stop_trim=[False],
                    skip_special_tokens=[skip],
                    spaces_between_special_tokens=[True],
                )
            )[0]
            text += delta
            logprobs += [(-1.0, i, None) for i in new]
            whole = self.server_args.incremental_streaming_output is False
            yield {
                "text": text if whole else delta,
                "output_ids": ids[: at + size] if whole else new,
                "meta_info": {
                    "finish_reason": {"type": "length"} if is_last else None,
                    "completion_tokens": at + len(new),
                    "reasoning_tokens": 3,
                    "output_token_logprobs": logprobs[:] if whole else logprobs[at:],
                    "output_token_logprobs_length": at + len(new),
                    "parse": [{}] if is_last else [],
                },
            }

    def streamed(self, ids, size, *, skip=False, custom=None):
        """The same in pieces."""
        params = {"skip_special_tokens": skip, "custom_params": custom}
        request = SimpleNamespace(stream=True, sampling_params=params)
        pieces = stream_pieces(request, self, self.config)
        for output in self.outputs(ids, size, skip=skip):
            yield from pieces.split(output) if pieces else [output]


def deltas(outputs):
    """What the client gets of outputs that hold all before them."""
    found, text = [], ""
    for one in outputs:
        assert one["text"].startswith(text)
        found.append(one["text"][len(text) :])
        text = one["text"]
    return [part for part in found if part]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_pieces_are_what_single_tokens_give(case, skip):
    """Red if a piece is not the text of a token, for steps of any length, or if the
    last one does not come with the end of the answer."""
    ids = tokenizer().encode(written(case, FORMATS["json"]))
    alone = list(Server().outputs(ids, 1, skip=skip))
    for size in (2, 3, 17, 1000):
        pieces = list(Server().streamed(ids, size, skip=skip))
        assert deltas(pieces) == deltas(alone)
        assert pieces[-1] == alone[-1]
        # A token without text comes with the next one.
        by_count = {one["meta_info"]["completion_tokens"]: one for one in alone}
        for piece in pieces:
            meta = by_count[piece["meta_info"]["completion_tokens"]]["meta_info"]
            assert piece["meta_info"] | {"parse": 0, "reasoning_tokens": 0} == (
                meta | {"parse": 0, "reasoning_tokens": 0}
            )
            assert piece["output_ids"] == ids[: meta["completion_tokens"]]
        for piece in pieces[:-1]:
            assert not piece["meta_info"].get("parse")


def test_incremental_pieces_add_up():
    """Red if tokens, text or logprobs are lost or come twice on a server with
    --incremental-streaming-output."""
    ids = tokenizer().encode(written("three", FORMATS["json"]))
    alone = [one["text"] for one in Server(incremental=True).outputs(ids, 1)]
    pieces = list(Server(incremental=True).streamed(ids, 40))
    assert [one["text"] for one in pieces if one["text"]] == [t for t in alone if t]
    assert [i for one in pieces for i in one["output_ids"]] == ids
    logprobs = [p for one in pieces for p in one["meta_info"]["output_token_logprobs"]]
    assert [token for _, token, _ in logprobs] == ids
    assert pieces[-1]["meta_info"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize(
    ("parser", "server", "request_", "expected"),
    [
        *[(None, None, None, 60), ("qwen25", None, None, 1), (None, 4, None, 4)],
        *[("qwen25", None, 6, 6), (None, 4, 6, 6), ("qwen25", 4, 0, 1)],
        ("qwen25", 10_000, None, 60),
    ],
)
def test_the_size_of_a_piece(parser, server, request_, expected):
    """Red if an option is not obeyed, or if streams are cut where nobody needs it."""
    ids = tokenizer().encode("a b c d e f g h " * 20)[:60]
    custom = None if request_ is None else {"parse_stream_tokens": request_}
    one = Server(parser=parser, stream_tokens=server)
    counts = [
        p["meta_info"]["completion_tokens"]
        for p in one.streamed(ids, 60, custom=custom)
    ]
    sizes = [b - a for a, b in zip([0, *counts], counts, strict=False)]
    assert max(sizes) == expected and sum(sizes) == 60


def test_answers_that_do_not_stream_stay_whole():
    one = Server()
    for params in (None, {}, [], "x", [{"custom_params": 5}]):
        request = SimpleNamespace(stream=False, sampling_params=params)
        assert stream_pieces(request, one, one.config) is None
        request.stream = True
        assert stream_pieces(request, one, one.config) is not None


@functools.cache
def read(text):
    """A text's single tokens, and its pieces where they come 16 and 1,000 at a time."""
    ids = tokenizer().encode(text)
    streams = [Server().streamed(ids, size) for size in (16, 1000)]
    return [deltas(one) for one in (Server().outputs(ids, 1), *streams)]


def parsed(make, texts):
    """(text, calls in order) of a parser that reads the texts one after the other."""
    parser, text, calls = make(), "", {}
    found = [parser.parse_stream_chunk(part) for part in texts]
    found.append(parser.parse_stream_end())
    for normal, items in found:
        text += normal or ""
        if isinstance(items, str):
            calls[None] = calls.get(None, "") + items
            continue
        for item in items or ():
            name, arguments = calls.get(item.tool_index, (None, ""))
            arguments += item.parameters or ""
            calls[item.tool_index] = (name or item.name, arguments)
    return text, calls


@pytest.mark.parametrize("name", FunctionCallParser.ToolCallParserEnum)
def test_a_parser_of_tool_calls_reads_pieces_as_single_tokens(name):
    """Red if a parser of SGLang finds other calls or prose in a step's pieces than in
    single tokens."""
    make = functools.partial(FunctionCallParser, TOOLS, name, tokenizer())
    try:
        make()
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"needs another tokenizer: {error}")
    for form, case in itertools.product(FORMATS.values(), CASES):
        alone, *pieces = read(written(case, form))
        assert [parsed(make, parts) for parts in pieces] == [parsed(make, alone)] * 2


@pytest.mark.parametrize("name", ReasoningParser.DetectorMap)
def test_a_parser_of_reasoning_reads_pieces_as_single_tokens(name):
    """Red if a parser of SGLang takes other text for reasoning in a step's pieces."""
    make = functools.partial(ReasoningParser, name, tokenizer=tokenizer())
    try:
        make()
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"needs another tokenizer: {error}")
    for opening, closing in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        for case in ("prose", "reasoning", "three"):
            text = written(case, FORMATS["json"]).replace("<think>", opening)
            alone, *pieces = read(text.replace("</think>", closing))
            expected = parsed(make, alone)
            assert [parsed(make, parts) for parts in pieces] == [expected] * 2


def test_a_parser_that_gets_a_whole_step_loses_calls():
    """Red once SGLang's parsers read whole steps: then nothing needs to be cut."""
    make = functools.partial(FunctionCallParser, TOOLS, "qwen25")
    text = written("three", FORMATS["json"])
    assert len(parsed(make, [text])[1]) < 3
    ids = tokenizer().encode(text)
    assert len(parsed(make, deltas(Server().streamed(ids, 1000)))[1]) == 3
