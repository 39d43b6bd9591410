"""`sglang-parse doctor`: what it tells of an installation and of a pair."""

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
    ("is_there", "message"),
    [
        (False, "--speculative-draft-model-path '{draft}' is not a folder"),
        (True, "lacks a tokenizer; complete it."),
    ],
)
def test_a_pair_that_cannot_start_has_the_servers_sentence(
    is_there, message, plugins, tmp_path
):
    """Red if a start would fail, and doctor does not say so in the same words."""
    draft = tmp_path / "draft"
    if is_there:
        draft.mkdir()
        for file in DRAFT_PATH.iterdir():
            if not file.name.startswith("tokenizer"):
                (draft / file.name).symlink_to(file)
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
