"""The list of families: what refusals and docs/models.md are made from."""

from pathlib import Path

import pytest

from docs.family_tables import PAGE, how_served, page_with_tables, rows_of
from sglang_parse.sgl.families import family_of


def test_page_shows_the_list():
    """Red if a family changed and docs/models.md did not."""
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(page) == page


def test_each_row_says_whether_it_is_served_and_each_name_stands_once():
    """Red if a refused family has no reason, a served one has, or two rows tell
    different things of a model."""
    names = [name for row in rows_of("family") for name in row["architectures"]]
    assert len(names) == len(set(names))
    for row in rows_of("family"):
        assert row["served"] == ("no" if row.get("why") else "yes"), row["name"]


def test_architectures_are_those_of_sglang():
    """Red if a name is misspelt: its models would be refused as unknown."""
    import sglang

    models = Path(sglang.__file__).parent / "srt" / "models"
    sources = "".join(p.read_text(encoding="utf-8") for p in models.glob("*.py"))
    for row in (*rows_of("family"), *rows_of("most_served")):
        for name in row["architectures"]:
            assert f"class {name}(" in sources, name


def test_refusals_come_from_the_list():
    """Red if a family that is served is refused, or an unknown one is served."""
    assert family_of("LlamaForCausalLM").why == ""
    assert "recurrent state" in family_of("Qwen3NextForCausalLM").why
    assert "recurrent state" in family_of("NemotronHForCausalLM").why
    assert "block-sparse" in family_of("MiniMaxM3SparseForCausalLM").why
    unknown = family_of("NobodysForCausalLM").why
    assert unknown == "belongs to no family that PARSE knows"


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["LlamaForCausalLM"], "yes"),
        (["DeepseekV4ForCausalLM"], "no"),
        (["Nobodys", "LlamaForCausalLM"], "yes; `Nobodys` refused"),
    ],
)
def test_families_that_people_serve_are_told_by_their_models(names, told):
    """Red if the page counts a family as served whose models are refused."""
    assert how_served(names) == told
