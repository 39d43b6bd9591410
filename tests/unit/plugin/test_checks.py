"""The EAGLE-3 head has to be the target's."""

import json
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.drafting.vocabularies import TokenizerMatch
from sglang_parse.embedded import HEAD_PATH, TARGET_PATH
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.validation import DRAFT_KEY_ENV
from sglang_parse.plugin import model_checks as checks
from sglang_parse.plugin.model_checks import (
    check_draft_pages,
    check_families,
    check_head,
)
from tests.support import tokenizer_kinds as kinds


def head_args(path, tmp_path, **changes):
    """Server arguments and settings with a head of the embedded one's config."""
    config = json.loads((HEAD_PATH / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = SimpleNamespace(model_path=str(TARGET_PATH), trust_remote_code=False)
    return args, ParseConfig(compose="eagle3", eagle_model_path=str(path))


def test_the_embedded_head_fits_the_embedded_target(tmp_path):
    """Red if a good head is refused."""
    check_head(*head_args(HEAD_PATH, tmp_path))
    check_head(SimpleNamespace(), ParseConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is LlamaForCausalLM; expected"),
        ({"hidden_size": 256}, "a target of hidden size 256; --model-path has 128"),
        ({"target_hidden_size": 64}, "a target of hidden size 64"),
        ({"vocab_size": 32000}, "vocabulary size 32000; --model-path has 640"),
    ],
    ids=str,
)
def test_a_head_of_another_target_is_refused(tmp_path, changes, message):
    """Red if such a head is found out by a crash in a matrix product."""
    with pytest.raises(ValueError, match="eagle-model-path is ") as error:
        check_head(*head_args(tmp_path, tmp_path, **changes))
    assert message in str(error.value)


def test_a_head_of_another_draft_is_refused(tmp_path):
    """Red if the draft's head is held against the target, or against nothing."""
    (tmp_path / "config.json").write_text(
        (HEAD_PATH / "config.json").read_text().replace("640", "320")
    )
    args = SimpleNamespace(
        model_path="/no/target",
        speculative_draft_model_path=str(TARGET_PATH),
        trust_remote_code=False,
    )
    settings = {"draft_compose": "eagle3", "draft_eagle_model_path": str(HEAD_PATH)}
    check_head(args, ParseConfig(**settings))
    settings["draft_eagle_model_path"] = str(tmp_path)
    told = "draft-eagle-model-path is .* 320; --speculative-draft-model-path has 640"
    with pytest.raises(ValueError, match=told):
        check_head(args, ParseConfig(**settings))
    args.speculative_draft_model_revision = None
    with pytest.raises(ValueError, match="draft-compose is 'mtp', and PARSE knows no"):
        check_head(args, ParseConfig(draft_compose="mtp"))


def test_models_are_read_at_their_own_revisions(monkeypatch):
    """Red if another revision of a model is looked at than is served, or a start ends
    because a configuration is not there yet."""
    from transformers import PretrainedConfig

    asked = []

    def get_config_dict(path, **more):
        asked.append((path, more["revision"]))
        raise OSError("no connection")

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", get_config_dict)
    args = SimpleNamespace(
        model_path="c/d",
        revision="v1",
        speculative_draft_model_path="a/b",
        speculative_draft_model_revision="v2",
    )
    check_families(args, ParseConfig())
    args.speculative_draft_model_path = None
    check_families(args, ParseConfig())
    assert asked == [("c/d", "v1"), ("a/b", "v2"), ("c/d", "v1")]


@pytest.mark.parametrize("has_card", [False, True])
@pytest.mark.parametrize("backend", [None, "dsa", "triton", "parse_torch"])
def test_sparse_attention_is_served_on_its_own_backend(
    monkeypatch, tmp_path, backend, has_card
):
    """Red if a start with such a target ends in a trace of SGLang, or a right one in a
    sentence."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_card)
    (tmp_path / "config.json").write_text('{"architectures": ["GlmMoeDsaForCausalLM"]}')
    args = SimpleNamespace(
        model_path=str(tmp_path),
        revision=None,
        speculative_draft_model_path=None,
        speculative_draft_model_revision=None,
        attention_backend=backend,
    )
    if backend == "dsa" or (backend is None and has_card):
        check_families(args, ParseConfig())
        return
    with pytest.raises(ValueError, match="GlmMoeDsa.* on a GPU with --attention-back"):
        check_families(args, ParseConfig())


@pytest.mark.refuses("draft in text", "pages")
def test_a_draft_in_text_is_refused_beside_pages():
    """Red if such a draft asks for slots one by one where SGLang gives pages: it loses
    them, and its drafts."""
    ids, text = (
        TokenizerMatch(),
        TokenizerMatch("id 5 is 'a' and 'b'", shares_ids=False),
    )
    for page, agreement in ((None, text), (1, text), (16, ids)):
        check_draft_pages(SimpleNamespace(page_size=page), agreement)
    with pytest.raises(ValueError, match=r"--page-size is 16, .*id 5 .*expected"):
        check_draft_pages(SimpleNamespace(page_size=16), text)


def test_a_head_that_is_not_there_is_refused(tmp_path):
    """Red if a mistyped path gives a trace instead of a sentence."""
    with pytest.raises(ValueError, match="eagle-model-path is .*holds no model"):
        check_head(*head_args(tmp_path / "nowhere", tmp_path))


def test_a_key_that_no_header_holds_ends_the_start(monkeypatch):
    """Red if such a key of a draft server is found when the first draft is asked for:
    the thread of the streams dies, and nothing says so."""
    monkeypatch.setattr(checks, "load_tokenizer", lambda *_, **__: kinds.embedded())
    args = SimpleNamespace(speculative_draft_model_path=None)
    config = ParseConfig(draft_url="http://localhost:1/v1")
    monkeypatch.setenv(DRAFT_KEY_ENV, "sk-\n")
    with pytest.raises(ValueError, match=f"{DRAFT_KEY_ENV} has a character"):
        checks.check_pair(args, config)
    monkeypatch.setenv(DRAFT_KEY_ENV, "sk-1")
    checks.check_pair(args, config)
