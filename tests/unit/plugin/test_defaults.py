"""Defaults that PARSE sets before SGLang resolves what depends on them."""

import pytest

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.plugin.defaults import GPU_ATTENTION_BACKEND

PARSE = (
    *("--speculative-algorithm", "parse"),
    *("--speculative-draft-model-path", str(DRAFT_PATH)),
)

pytestmark = pytest.mark.usefixtures("plugins")


def backend_seen_by_sglang(*flags: str) -> str | None:
    """What SGLang's own choice of a backend finds already chosen."""
    return backends_seen_by_sglang("--model-path", str(TARGET_PATH), *flags)[0]


def backends_seen_by_sglang(*flags: str) -> tuple[str | None, str | None]:
    """The same, and the backend of models that draft."""
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    args, seen = prepare_server_args([*flags]), []
    step = resolution_hooks._HOOKS["handle_deterministic_inference"][0]
    step(args, lambda a: seen.append(resolving_view(a)))
    (view,) = seen
    return view.attention_backend, view.speculative_draft_attention_backend


def test_parse_takes_flashinfer_where_none_is_named():
    """Red if a Hopper card's default (fa3) is chosen, which PARSE then refuses."""
    assert backend_seen_by_sglang(*PARSE) == GPU_ATTENTION_BACKEND


def test_a_named_backend_is_kept():
    """Red if --attention-backend triton is overruled."""
    flags = ("--attention-backend", "triton")
    assert backend_seen_by_sglang(*PARSE, *flags) == "triton"


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        (("--prefill-attention-backend", "triton"), "triton"),
        (("--decode-attention-backend", "triton"), GPU_ATTENTION_BACKEND),
    ],
)
def test_where_one_is_named_the_other_is_one_that_can_verify(flags, backend):
    """Red if SGLang's default for the card stands beside the one that was named."""
    assert backend_seen_by_sglang(*PARSE, *flags) == backend


@pytest.mark.parametrize(
    ("flags", "drafts"),
    [
        ((), GPU_ATTENTION_BACKEND),
        (("--attention-backend", "dsa"), GPU_ATTENTION_BACKEND),
        (("--speculative-draft-attention-backend", "triton"), "triton"),
    ],
)
def test_sparse_attention_has_its_own_backend_and_its_draft_another(
    tmp_path, flags, drafts
):
    """Red if such a target is given FlashInfer, or its draft the target's backend."""
    (tmp_path / "config.json").write_text('{"architectures": ["GlmMoeDsaForCausalLM"]}')
    seen = backends_seen_by_sglang(*PARSE, "--model-path", str(tmp_path), *flags)
    assert seen == ("dsa", drafts)


def test_other_servers_choose_for_themselves():
    """Red if installing the plugin changes servers that do not use PARSE."""
    assert backend_seen_by_sglang() is None


def test_steps_come_before_what_they_are_for():
    """Red if SGLang renames a step, looks at a model before our first checks, or
    chooses a backend before our default."""
    from sglang.srt.arg_groups import pipeline, resolution_hooks

    source = pipeline.__loader__.get_source(pipeline.__name__)
    names = (
        *("handle_deprecated_dp_attention", "handle_model_source_paths"),
        *("handle_deterministic_inference", "handle_attention_backend_compatibility"),
    )
    calls = [source.index(f"run_hook({name}, ") for name in names]
    assert calls == sorted(calls)
    assert {names[0], names[2]} <= set(resolution_hooks._HOOKS)
