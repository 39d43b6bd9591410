"""Names of segmenters, which installed packages may add to."""

import pytest

from sglang_parse.options import segmenters
from sglang_parse.options.extensions import Extensions
from sglang_parse.options.request import check_custom_params
from sglang_parse.options.segmenters import (
    SEGMENTERS,
    check_segmenter,
)
from sglang_parse.options.server import ParseConfig
from tests.support.packages import install


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package with segmenters; that named "broken" cannot be imported."""

    def install_names(*names):
        values = {n: "math:floor" for n in names}
        if "broken" in values:
            values["broken"] = "parse_test_missing:rule"
        install(tmp_path, "my-package", {"sglang_parse.segmenters": values})
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(
            segmenters,
            "SEGMENTER_EXTENSIONS",
            Extensions("segmenter", SEGMENTERS, "a function"),
        )
        return segmenters.SEGMENTER_EXTENSIONS

    return install_names


def test_a_packages_name_may_be_asked_for(installed):
    """Red if names are closed anywhere: a check, the settings or a request."""
    for call in (
        lambda: check_segmenter("proof", "segmenter"),
        lambda: ParseConfig(segmenter="proof"),
        lambda: check_custom_params({"parse_segmenter": "proof"}),
    ):
        with pytest.raises(ValueError, match="'proof'; expected one of line, par"):
            call()
    installed("proof")
    assert check_segmenter("proof", "segmenter") == "proof"
    assert ParseConfig(segmenter="proof").segmenter == "proof"
    assert check_custom_params({"parse_segmenter": "proof"})


def test_error_lists_the_names_of_packages(installed):
    """Red if a user of a package is not told of its segmenters."""
    installed("proof")
    with pytest.raises(ValueError, match=r"code, proof or fixed:N with N >= 1\."):
        check_segmenter("prof", "segmenter")


def test_name_of_a_broken_rule_says_why(installed):
    """Red if a request that names a broken rule reaches the engine, or learns nothing
    of the reason."""
    installed("broken")
    with pytest.raises(ValueError) as raised:
        check_custom_params({"parse_segmenter": "broken"})
    assert str(raised.value).startswith(
        "custom_params.parse_segmenter is 'broken': the segmenter 'broken' of "
        "my-package 1.0 (entry point group sglang_parse.segmenters) cannot be "
        "imported (Module"
    )
