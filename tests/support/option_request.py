"""A request of SGLang's as far as its options look at it."""

from types import SimpleNamespace


def request(custom_params=None, **overrides):
    """A Req as far as the options look at it."""
    params = {
        "custom_params": custom_params,
        "logit_bias": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    fields = {
        "grammar": None,
        "input_embeds": None,
        "positional_embed_overrides": None,
        "return_logprob": False,
        "return_hidden_states": False,
        "custom_logit_processor": None,
        "multimodal_inputs": None,
    }
    for key, value in overrides.items():
        (params if key in params else fields)[key] = value
    return SimpleNamespace(sampling_params=SimpleNamespace(**params), **fields)
