"""A head for multi-token prediction is in the target's checkpoint, or one sentence."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from sglang_parse.embedded import TARGET_PATH
from sglang_parse.sgl.mtp import check_mtp
from tests.support.tiny_models import FAMILIES
from tests.support.tiny_mtp import build_with_mtp


def args_of(path, **more):
    fields = {"revision": None, "download_dir": None, "load_format": "auto"}
    of_draft = {
        "speculative_draft_model_path": str(path),
        "speculative_draft_model_revision": None,
    }
    return SimpleNamespace(
        model_path=str(path), trust_remote_code=False, **{**fields, **of_draft, **more}
    )


def test_a_checkpoint_needs_the_weights_of_its_head(tmp_path):
    """Red if the head's weights are looked for under other names, or a head is served
    whose weights nobody wrote."""
    folder = tmp_path / "glm4_moe"
    build_with_mtp("glm4_moe", folder)
    check_mtp(args_of(folder))
    (file,) = folder.glob("*.safetensors")
    kept = {
        k: v for k, v in load_file(file).items() if not k.startswith("model.layers.2.")
    }
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="compose is 'mtp'.* holds no weights ") as e:
        check_mtp(args_of(folder))
    assert str(folder) in str(e.value) and str(e.value).count(". ") == 0
    check_mtp(args_of(folder, load_format="dummy"))
    index = {"weight_map": dict.fromkeys([*kept, "model.layers.2.enorm.weight"], "x")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_mtp(args_of(folder))


def test_a_config_that_names_no_head_is_refused(tmp_path):
    """Red if the check waits for weights that say nothing of a config."""
    family = FAMILIES["glm4_moe"]
    replace(family, more={"num_nextn_predict_layers": 0}).build(tmp_path)
    told = "num_nextn_predict_layers in its config.json; leave it out"
    with pytest.raises(ValueError, match=told):
        check_mtp(args_of(tmp_path, load_format="dummy"))


def test_a_draft_is_asked_for_its_own_head(tmp_path):
    """Red if the target is looked at in place of the draft, or the sentence names
    another flag than the draft's."""
    with_head, without = tmp_path / "with", tmp_path / "without"
    build_with_mtp("glm4_moe", with_head)
    FAMILIES["glm4_moe"].build(without)
    args = args_of(without, speculative_draft_model_path=str(with_head))
    args.speculative_draft_model_revision = "v2"
    assert check_mtp(args, "draft_compose") == (str(with_head), "v2")
    args = args_of(with_head, speculative_draft_model_path=str(without))
    told = "draft-compose is 'mtp', and --speculative-draft-model-path .* holds no"
    with pytest.raises(ValueError, match=told):
        check_mtp(args, "draft_compose")
    told = "draft-compose is 'mtp', and PARSE knows no such head of LlamaForCausalLM"
    with pytest.raises(ValueError, match=told):
        check_mtp(args_of(TARGET_PATH), "draft_compose")


def test_families_without_a_proven_head_are_refused():
    """Red if a head is served that no test has seen."""
    with pytest.raises(ValueError, match="no such head of LlamaForCausalLM; leave"):
        check_mtp(args_of(TARGET_PATH))
