"""`sglang-parse doctor`: what it tells of an installation and of a pair."""

import json

import pytest

from sglang_parse.cli import doctor
from sglang_parse.cli import main as cli
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH


def test_the_embedded_pair_passes_here(plugins, capsys):
    """Red if doctor finds fault with the pair that the package ships, or leaves out one
    of the checks of a server's start."""
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and all(line.startswith("ok       ") for line in lines)
    assert f"{TARGET_PATH} with {DRAFT_PATH} passes" in lines[4]
    assert "as token ids: tokenizers agree" in lines[5]
    assert "Yes=404 No=403: '<|im_end|>" in lines[6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "--speculative-draft-model-path '{draft}' is not a folder"),
        ({"tokenizer.json": None}, "lacks a tokenizer; complete it."),
        ({"config.json": {"max_position_embeddings": 64}}, "--context-length 64 or"),
    ],
)
def test_a_pair_that_cannot_start_has_the_servers_sentence(
    changes, message, plugins, tmp_path
):
    """Red if a start would fail, and doctor does not say so in the same words."""
    draft = tmp_path / "draft"
    if changes is not None:
        draft.mkdir()
        for file in DRAFT_PATH.iterdir():
            (draft / file.name).symlink_to(file)
        for name, more in changes.items():
            config = json.loads((draft / name).read_text()) | (more or {})
            (draft / name).unlink()
            if more:
                (draft / name).write_text(json.dumps(config))
            else:
                (draft / "tokenizer_config.json").unlink()
    findings = list(doctor.run_checks(str(TARGET_PATH), str(draft)))
    assert [f.ok for f in findings] == [True] * 4 + [False]
    assert message.format(draft=draft) in findings[-1].text


def test_doctor_goes_on_after_a_failed_check(monkeypatch, capsys):
    """Red if a broken installation ends it with a traceback, or with status 0."""

    def broken():
        raise ImportError("no torch\nhere")

    for name in ("versions", "plugin", "platform", "hooks"):
        monkeypatch.setattr(doctor, f"check_{name}", broken)
    monkeypatch.setattr(doctor, "check_start", lambda *_: "fine")
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["problem  ImportError: no torch here"] * 4 + ["ok       fine"]
