"""What SGLang's resolution makes of a PARSE server."""

import pytest

from sglang_parse.embedded import TARGET_PATH
from sglang_parse.options.server import CONFIG_ENV
from sglang_parse.sgl.names import CPU_ATTENTION_BACKEND
from tests.support.resolution import DRAFT, TARGET, resolve

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture(autouse=True)
def no_config_env(monkeypatch):
    monkeypatch.delenv(CONFIG_ENV, raising=False)


def test_defaults_resolve_to_a_server_that_can_run():
    """Red if a default that SGLang sets for built-in algorithms only is missing."""
    args = resolve(*TARGET, *DRAFT)
    assert args.speculative_algorithm == "PARSE"
    assert args.disable_overlap_schedule
    assert args.page_size == 1
    assert args.speculative_num_draft_tokens >= 2
    assert args.speculative_eagle_topk == 1
    assert args.max_running_requests > 0
    assert args.cuda_graph_backend_decode == "disabled"


def test_cpu_defaults_use_our_backend_and_float32():
    """Red if a CPU server takes a backend without custom masks, or bfloat16."""
    from sglang.srt.platforms import current_platform

    if current_platform.device_name != "cpu":
        pytest.skip("this machine has an accelerator")
    args = resolve(*TARGET, *DRAFT)
    assert args.attention_backend == CPU_ATTENTION_BACKEND
    assert args.dtype == "float32"
    assert args.max_total_tokens > 0


def test_pages_and_two_backends_are_kept():
    """Red if pages or a second attention backend are resolved away."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    args = resolve(
        *(*TARGET, *DRAFT, "--page-size", "16"),
        *("--decode-attention-backend", "torch_native"),
    )
    assert args.page_size == 16
    assert attention_backends_of(args) == (CPU_ATTENTION_BACKEND, "torch_native")


def test_lower_case_name_is_the_same_algorithm():
    """Red if `--speculative-algorithm parse` is unknown."""
    flags = ("--model-path", str(TARGET_PATH), "--speculative-algorithm", "parse")
    assert resolve(*flags, *DRAFT).speculative_algorithm == "PARSE"


def test_released_weights_of_the_draft_model_are_kept_aside():
    """Red if a server that released its weights goes on with a draft model that has
    none: an update brings those of the target back, and no others."""
    assert not resolve(*TARGET, *DRAFT).enable_draft_weights_cpu_backup
    args = resolve(*TARGET, *DRAFT, "--enable-memory-saver")
    assert args.enable_draft_weights_cpu_backup


def test_other_algorithms_are_left_alone():
    """Red if our validation runs on servers that do not use PARSE."""
    args = resolve("--model-path", str(TARGET_PATH), "--page-size", "1")
    assert args.speculative_algorithm is None
