"""A stand-in for SGLang's HTTP server over the embedded task; one character, one token.

It knows the right answer of every problem it is asked. A "draft" slips in one step of
every third problem; a PARSE server keeps that slip unless the threshold is high.
"""

import json
import math
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks import embedded_answers
from sglang_parse.embedded import task

END, YES, NO, JUDGE = 0, 1, 2, 3  # ids no text has


class CharTokenizer:
    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        turns = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return turns + "<assistant>"

    def encode(self, text, add_special_tokens):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(i) for i in ids if i > JUDGE)


PROBLEMS = {
    p.prompt: p for p in (*task.make_problems(64, 64), *task.make_problems(64, 65))
}


def slips(problem):
    return zlib.crc32(problem.prompt.encode()) % 3 == 0


def draft_text(problem):
    """Style B, with a wrong total in step 2 and after it where the draft slips."""
    text = embedded_answers.render_answer(problem, "B")
    if not slips(problem):
        return text
    lines = embedded_answers.split_segments(text)
    lines[1] = embedded_answers.render_step(problem, 2, "B2", total=99)
    lines[-1] = embedded_answers.ANSWER_LINE.format(total=99)
    return "".join(lines)


def segments(problem, threshold):
    """A report's segments: one round over the whole draft, kept or rejected."""
    text, at, rows = draft_text(problem), 0, []
    for line in embedded_answers.split_segments(text):
        at += len(line)
        valid = embedded_answers.first_error(problem, text[:at]) is None
        score = 0.95 if valid else 0.6
        row = {"origin": "draft", "score": score, "start": 0}
        row["outcome"] = "kept" if score >= threshold else "rejected"
        rows.append({**row, "token_ids": [ord(c) for c in line]})
    last = {"origin": "target", "outcome": "written", "start": at, "score": None}
    return [*rows, {**last, "token_ids": [END]}]


class FakeServer:
    """role: "target", "draft" or "parse". Used as launch.ServerProcess is."""

    def __init__(self, role, delay_s=0.0):
        """delay_s: of every request."""
        self.role, self.delay_s, self.bodies = role, delay_s, []
        self.settings = {"mode": "semantic"}
        self.draft = "a draft"
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self):
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(0.02,), daemon=True).start()

    def wait_ready(self):
        pass

    def processes(self):
        return []

    def stop(self):
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def answer(self, body):
        self.bodies.append(body)
        ids = body["input_ids"]
        text = CharTokenizer().decode(ids, True)
        question, _, so_far = text.rpartition("<assistant>")
        problem = PROBLEMS[question.rpartition("<user>")[2]]
        params = body["sampling_params"]
        custom = params.get("custom_params", {})
        if "token_ids_logprob" in body:
            assert ids[-1] == JUDGE and params["max_new_tokens"] == 1
            p = 0.9 if embedded_answers.first_error(problem, so_far) is None else 0.2
            row = [(math.log(p), YES, None), (math.log(1 - p), NO, None)]
            return "?", {"output_token_ids_logprobs": [row]}
        meta = {}
        whole = embedded_answers.render_answer(problem, "A")
        if self.role == "draft":
            whole = draft_text(problem)
        elif self.role == "parse" and custom.get("parse_mode") not in ("exact", "off"):
            threshold = custom.get("parse_threshold", 0.5)
            whole = draft_text(problem) if threshold <= 0.6 else whole
            report = {"mode": "semantic", "target_passes": 2, "draft_tokens": 40}
            report |= {"kept_tokens": 30, "matched_tokens": 0, "kept_segments": 3}
            if custom.get("parse_report"):
                report["segments"] = segments(problem, threshold)
            meta["parse"] = [report]
        if "stop" in params:  # one step: the line after those there are
            lines = embedded_answers.split_segments(whole)
            whole = lines[len(embedded_answers.split_segments(so_far))]
        return whole, meta

    def _handler(fake):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def reply(self, data):
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                state = {"parse": {"settings": fake.settings}}
                info = {"tokenizer_path": "fake", "internal_states": [state]}
                info |= {"attention_backend": "fake", "max_req_input_len": 4096}
                info["speculative_draft_model_path"] = fake.draft
                self.reply(json.dumps(info).encode())

            def do_POST(self):
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                if not self.path.startswith("/generate"):
                    return self.reply(b"ok")
                body = json.loads(body)
                time.sleep(fake.delay_s)
                text, meta = fake.answer(body)
                ids = [ord(c) for c in text]
                ended = not text.endswith("\n")
                reason = {"type": "stop", "matched": END if ended else "\n"}
                chunk = {
                    "text": text,
                    "output_ids": ids + [END] * ended,
                    "meta_info": {
                        "completion_tokens": len(ids) + ended,
                        "finish_reason": reason,
                        **meta,
                    },
                }
                line = b"data: " + json.dumps(chunk).encode() + b"\n\n"
                self.reply(line + b"data: [DONE]\n\n")

        return Handler
