"""Sessions of clients' SDKs with a PARSE server of the embedded pair: a tool call and
its result, the same streamed, and an answer in a structure.

The pair is too small to call tools, so each answer is a client's text that passes every
verdict, or follows from a grammar that allows one answer. The SDKs have a virtual
environment of their own (`make clients` prepares it).

    python -m benchmarks.client_sessions --python build/clients/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

MODEL = "embedded"
STOP = "@@"
QUESTION = "Weather in Rome?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
ANSWER = "It is warm in Rome."
ARGUMENTS = {"city": "Rome"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome"]}},
    "required": ["city"],
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": PARAMETERS,
    },
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}}


def call_of(name: str) -> str:
    body = json.dumps({"name": name, "arguments": ARGUMENTS})
    return f"<tool_call>\n{body}\n</tool_call>"


def forced(text: str) -> dict[str, Any]:
    """`extra_body` that makes a text the answer."""
    custom = {"parse_draft": f"{text}\n{STOP}", "parse_threshold": 0}
    return {"custom_params": custom, "return_meta_info": True}


CALLING = forced(call_of("get_weather"))
ANSWERING = forced(ANSWER)


def in_metadata(text: str) -> dict[str, str]:
    draft = f"{text}\n{STOP}"
    return {
        "parse_draft": draft,
        "parse_threshold": "0",
        "return_meta_info": "true",
    }


def is_report(meta_info: Any) -> bool:
    return bool(meta_info["parse"][0]["client_text_tokens"])


def with_result(call_id: str) -> list[Any]:
    """The messages behind a call and its result."""
    function = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "warm"},
    ]


# -- Sessions: what each SDK was seen to do, by column ----------

Found = dict[str, Any]
COLUMNS = ("tool call and result", "streamed", "structured output", "report")


def openai_chat(url: str) -> Found:
    from openai import OpenAI

    client = OpenAI(base_url=url + "/v1", api_key="none")
    chat: Any = client.chat.completions
    options = {"model": MODEL, "temperature": 0, "stop": [STOP]}
    calling = options | {"messages": ASKED, "tools": [TOOL], "extra_body": CALLING}
    first = chat.create(**calling)
    call = first.choices[0].message.tool_calls[0]
    second = chat.create(
        **options, messages=with_result(call.id), tools=[TOOL], extra_body=ANSWERING
    )
    streamed = ""
    for chunk in chat.create(**calling, stream=True):
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or ():
                streamed += part.function.arguments or ""
    shaped = chat.create(**options, messages=ASKED, response_format=FORMAT)
    return {
        COLUMNS[0]: json.loads(call.function.arguments) == ARGUMENTS
        and second.choices[0].message.content.strip() == ANSWER,
        COLUMNS[1]: json.loads(streamed) == ARGUMENTS,
        COLUMNS[2]: json.loads(shaped.choices[0].message.content) == ARGUMENTS,
        COLUMNS[3]: is_report(first.choices[0].meta_info),
    }


def openai_responses(url: str) -> Found:
    from openai import OpenAI

    client = OpenAI(base_url=url + "/v1", api_key="none")
    tool = {"type": "function", **TOOL["function"]}
    create: Any = client.responses.create
    options = {"model": MODEL, "tools": [tool], "extra_body": {"stop": [STOP]}}
    calling = options | {"metadata": in_metadata(call_of("get_weather"))}
    first = create(**calling, input=QUESTION)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    sent = {"type": "function_call", "call_id": call.call_id, "name": call.name}
    items = [*ASKED, {**sent, "arguments": call.arguments}, result]
    second = create(**options, metadata=in_metadata(ANSWER), input=items)
    last: Any = list(create(**calling, input=QUESTION, stream=True))[-1]
    (again,) = [item for item in last.response.output if item.type == "function_call"]
    text = {"format": {"type": "json_schema", "name": "place", "schema": PARAMETERS}}
    shaped = create(model=MODEL, input=QUESTION, text=text)
    return {
        COLUMNS[0]: json.loads(call.arguments) == ARGUMENTS
        and second.output_text.strip() == ANSWER,
        COLUMNS[1]: json.loads(again.arguments) == ARGUMENTS,
        COLUMNS[2]: json.loads(shaped.output_text) == ARGUMENTS,
        COLUMNS[3]: is_report(first.meta_info) and is_report(last.response.meta_info),
    }


def anthropic_messages(url: str) -> Found:
    from anthropic import Anthropic

    messages: Any = Anthropic(base_url=url, api_key="none").messages
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    options = {"model": MODEL, "max_tokens": 200, "stop_sequences": [STOP]}
    shape = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    shaped = messages.create(**options, messages=ASKED, output_config=shape)
    options |= {"tools": [tool]}
    calling = {"messages": ASKED, "metadata": in_metadata(call_of("get_weather"))}
    first = messages.create(**options, **calling)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    used = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "warm"}
    turns = [
        *ASKED,
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    second = messages.create(**options, messages=turns, metadata=in_metadata(ANSWER))
    with messages.stream(**options, **calling) as stream:
        events = list(stream)
        again = stream.get_final_message()
    (last,) = [event for event in events if event.type == "message_delta"]
    return {
        COLUMNS[0]: call.input == ARGUMENTS
        and second.content[0].text.strip() == ANSWER,
        COLUMNS[1]: [b.input for b in again.content if b.type == "tool_use"]
        == [ARGUMENTS],
        COLUMNS[2]: json.loads(shaped.content[0].text) == ARGUMENTS,
        COLUMNS[3]: is_report(first.meta_info) and is_report(last.meta_info),
    }


def litellm_chat(url: str) -> Found:
    import litellm

    options = {"model": f"openai/{MODEL}", "api_base": url + "/v1", "api_key": "none"}
    options |= {"temperature": 0, "stop": [STOP]}
    ask: Any = litellm.completion
    calling = options | {"messages": ASKED, "tools": [TOOL], "extra_body": CALLING}
    first = ask(**calling)
    call = first.choices[0].message.tool_calls[0]
    second = ask(
        **options, messages=with_result(call.id), tools=[TOOL], extra_body=ANSWERING
    )
    streamed = ""
    for chunk in ask(**calling, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            streamed += part.function.arguments or ""
    shaped = ask(**options, messages=ASKED, response_format=FORMAT)
    return {
        COLUMNS[0]: json.loads(call.function.arguments) == ARGUMENTS
        and second.choices[0].message.content.strip() == ANSWER,
        COLUMNS[1]: json.loads(streamed) == ARGUMENTS,
        COLUMNS[2]: json.loads(shaped.choices[0].message.content) == ARGUMENTS,
        COLUMNS[3]: "meta_info" in first.choices[0].to_dict() or None,
    }


def langchain_chat(url: str) -> Found:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(
        model=MODEL,
        base_url=url + "/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        stop_sequences=[STOP],
    )
    calling = model.bind_tools([TOOL]).bind(extra_body=CALLING)
    first = calling.invoke(QUESTION)
    (call,) = first.tool_calls
    turns = [
        HumanMessage(QUESTION),
        first,
        ToolMessage("warm", tool_call_id=call["id"]),
    ]
    second = model.bind_tools([TOOL]).bind(extra_body=ANSWERING).invoke(turns)
    whole = None
    for chunk in calling.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    shape = {"title": "place", "description": "A place.", **PARAMETERS}
    shaped = model.with_structured_output(shape, method="json_schema").invoke(QUESTION)
    return {
        COLUMNS[0]: call["args"] == ARGUMENTS and second.content.strip() == ANSWER,
        COLUMNS[1]: [one["args"] for one in whole.tool_calls] == [ARGUMENTS],
        COLUMNS[2]: shaped == ARGUMENTS,
        COLUMNS[3]: "meta_info" in first.response_metadata or None,
    }


def pydantic_ai_agent(url: str) -> Found:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput, Tool
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Place(BaseModel):
        city: Literal["Rome"]

    provider = OpenAIProvider(base_url=url + "/v1", api_key="none")
    model = OpenAIChatModel(MODEL, provider=provider)
    asked: list[str] = []

    def settings(context: Any) -> Any:
        body = ANSWERING if asked else CALLING
        return {"temperature": 0, "stop_sequences": [STOP], "extra_body": body}

    def get_weather(city: str) -> str:
        asked.append(city)
        return "warm"

    # A strict tool is a grammar, and no answer with a grammar is judged or forced.
    tool = Tool(get_weather, strict=False)
    agent: Any = Agent(model, tools=[tool], model_settings=settings)
    whole = agent.run_sync(QUESTION)
    cities = [*asked]
    asked.clear()
    streamed = agent.run_stream_sync(QUESTION).get_output()
    shaped: Any = Agent(model, output_type=NativeOutput(Place)).run_sync(QUESTION)
    return {
        COLUMNS[0]: cities == ["Rome"] and whole.output.strip() == ANSWER,
        COLUMNS[1]: asked == ["Rome"] and streamed.strip() == ANSWER,
        COLUMNS[2]: shaped.output.city == "Rome",
        COLUMNS[3]: None,
    }


def instructor_models(url: str) -> Found:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Place(BaseModel):
        city: Literal["Rome"]

    plain = OpenAI(base_url=url + "/v1", api_key="none")
    options: Any = {"model": MODEL, "messages": ASKED, "temperature": 0}
    options |= {"response_model": Place, "max_retries": 0, "stop": [STOP]}
    made: Any = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    # instructor names the tool, which is a grammar.
    body = forced(call_of("Place")) | {"tool_choice": "auto"}
    called, whole = made.create_with_completion(**options, extra_body=body)
    shaping: Any = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    # In Mode.TOOLS instructor 1.17 yields nothing of a stream that the SDK reads.
    parts = list(shaping.create_partial(**options))
    return {
        COLUMNS[0]: called.city == "Rome",
        COLUMNS[1]: parts[-1].city == "Rome",
        COLUMNS[2]: shaping.create(**options).city == "Rome",
        COLUMNS[3]: is_report(whole.choices[0].meta_info),
    }


def dspy_programs(url: str) -> Found:
    import dspy

    options = {"api_base": url + "/v1", "api_key": "none", "cache": False}
    options |= {"temperature": 0, "stop": [STOP], "max_tokens": 200}
    lm: Any = dspy.LM(f"openai/{MODEL}", **options)
    (called,) = lm(messages=ASKED, tools=[TOOL], extra_body=CALLING)
    (call,) = called["tool_calls"]
    (answered,) = lm(messages=with_result(call.id), tools=[TOOL], extra_body=ANSWERING)
    text = answered if isinstance(answered, str) else answered["text"]
    shape = "[[ ## city ## ]]\nRome\n\n[[ ## completed ## ]]"
    with dspy.context(lm=lm):
        shaped = dspy.Predict("question -> city")(
            question=QUESTION, config={"extra_body": forced(shape)}
        )
    return {
        COLUMNS[0]: json.loads(call.function.arguments) == ARGUMENTS
        and text.strip() == ANSWER,
        COLUMNS[1]: None,
        COLUMNS[2]: shaped.city == "Rome",
        COLUMNS[3]: None,
    }


SESSIONS: dict[str, tuple[str, Callable[[str], Found]]] = {
    "OpenAI SDK, chat": ("openai", openai_chat),
    "OpenAI SDK, responses": ("openai", openai_responses),
    "Anthropic SDK": ("anthropic", anthropic_messages),
    "LiteLLM": ("litellm", litellm_chat),
    "LangChain `ChatOpenAI`": ("langchain-openai", langchain_chat),
    "pydantic-ai": ("pydantic-ai", pydantic_ai_agent),
    "instructor": ("instructor", instructor_models),
    "DSPy": ("dspy", dspy_programs),
}
SHOWN = {True: "passed", False: "FAILED", None: "no way to it"}


def run_sessions(url: str) -> int:
    """Run all sessions, print a table and return how many failed."""
    print("| SDK | version | " + " | ".join(COLUMNS) + " |")
    print("|---" * (2 + len(COLUMNS)) + "|", flush=True)
    num_failed = 0
    for name, (package, session) in SESSIONS.items():
        try:
            found = session(url)
        except Exception:
            traceback.print_exc()
            found = dict.fromkeys(COLUMNS, False)
        if False in found.values():
            num_failed += 1
        cells = [SHOWN[found[column]] for column in COLUMNS]
        print(
            f"| {name} | {version(package)} | " + " | ".join(cells) + " |", flush=True
        )
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the one that has the SDKs")
    parser.add_argument("--log", default="build/clients.log", help="of the server")
    args = parser.parse_args()
    from sglang_parse.demo.servers import ServerProcess
    from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH

    flags = (
        *("--model-path", str(TARGET_PATH), "--served-model-name", MODEL),
        *("--speculative-draft-model-path", str(DRAFT_PATH)),
        *("--speculative-algorithm", "PARSE", "--tool-call-parser", "qwen25"),
        "--constrained-json-disable-any-whitespace",
        *("--speculative-parse-client-options", "all", "--max-total-tokens", "16384"),
    )
    with ServerProcess(flags, "clients", Path(args.log)) as server:
        command = [args.python, __file__, server.url]
        env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return subprocess.run(command, check=False, env=env, timeout=400).returncode


if __name__ == "__main__":
    is_child = len(sys.argv) == 2 and sys.argv[1].startswith("http")
    sys.exit(bool(run_sessions(sys.argv[1])) if is_child else main())
