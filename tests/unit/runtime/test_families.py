"""The list of families: what refusals and docs/models.md are made from."""

import re
from pathlib import Path

import pytest

from sglang_parse.runtime import families
from sglang_parse.runtime.families import MostServed, page_with_tables, refusal_of

DOCS = Path(__file__).parents[3] / "docs"


def test_page_shows_the_list():
    """Red if a family changed and docs/models.md did not."""
    page = (DOCS / families.PAGE).read_text(encoding="utf-8")
    assert page_with_tables(page) == page


def test_architectures_are_those_of_sglang():
    """Red if a name is misspelt: its models would be refused as unknown."""
    import sglang

    models = Path(sglang.__file__).parent / "srt" / "models"
    sources = "".join(p.read_text(encoding="utf-8") for p in models.glob("*.py"))
    for family in (*families.families(), *families.most_served()):
        for name in family.architectures:
            assert f"class {name}(" in sources, name


def test_refusals_come_from_the_list():
    """Red if a family that is served is refused, or an unknown one is served."""
    assert refusal_of("LlamaForCausalLM") == ""
    assert refusal_of("Qwen3NextForCausalLM") == ""
    assert "recurrent state" in refusal_of("NemotronHForCausalLM")
    assert "block-sparse" in refusal_of("MiniMaxM3SparseForCausalLM")
    assert refusal_of("NobodysForCausalLM") == "belongs to no family that PARSE knows"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('served = "no"', "needs yes, or no and why"),
        ('served = "yes"\nwhy = "is old"', "needs yes, or no and why"),
        ('served = "perhaps"', "needs yes, or no and why"),
    ],
)
def test_broken_row_is_named(tmp_path, monkeypatch, row, told):
    """Red if a refused family has no reason, or a served one has."""
    file = tmp_path / "families.toml"
    file.write_text(f'[[family]]\nname = "X"\narchitectures = ["A"]\n{row}\n')
    monkeypatch.setattr(families, "FILE", file)
    with pytest.raises(ValueError, match=told):
        families.families.__wrapped__()


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["LlamaForCausalLM"], "yes"),
        (["DeepseekV4ForCausalLM"], "no"),
        (["Qwen3NextForCausalLM"], "on the CPU platform alone"),
        (["NobodysForCausalLM", "LlamaForCausalLM"], "yes; `Nobodys.*` refused"),
    ],
)
def test_families_that_people_serve_are_told_by_their_models(names, told):
    """Red if the page counts a family as served whose models are refused."""
    assert re.fullmatch(told, MostServed("X", tuple(names)).told())
