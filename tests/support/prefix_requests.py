"""An oracle for verdicts: a prefix is judged by an ordinary request of its own."""

import math

from sglang_parse.judging.prompt import build_judge_prompt
from sglang_parse.options.table import DEFAULT_JUDGE_SUFFIX


def judge_of(tokenizer, question=DEFAULT_JUDGE_SUFFIX):
    """The suffix and the verdict tokens of a question."""
    return build_judge_prompt(tokenizer, question, (("Yes", "No"),))


def score_alone(server, judge, prompt, prefix) -> float:
    """Verdict by an ordinary prefill of the prompt, the prefix and the question."""
    (yes, no) = judge.verdict_ids[0]
    result = server.generate(
        [*prompt, *prefix, *judge.suffix],
        max_new_tokens=1,
        top={"return_logprob": True, "token_ids_logprob": [yes, no]},
    )
    logprobs = {
        token: math.exp(value)
        for value, token, _ in result["meta_info"]["output_token_ids_logprobs"][0]
    }
    return logprobs[yes] / (logprobs[yes] + logprobs[no])
