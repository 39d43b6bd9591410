"""What doctor says of a pair: kernels to compile, memory, context lengths."""

import json
from pathlib import Path

import pytest

from sglang_parse.cli import doctor, doctor_pair
from sglang_parse.cli.estimate import MODELS
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH

KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "num_experts",
    "num_experts_per_tok",
    "tie_word_embeddings",
)
H200 = 141 * 10**9


@pytest.fixture
def pair(tmp_path):
    """Folders of Qwen3-32B and Qwen3-1.7B without weights."""
    for name in ("Qwen3-32B", "Qwen3-1.7B"):
        (tmp_path / name).mkdir()
        config = dict(zip(KEYS, MODELS[name], strict=True))
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "Qwen3-32B"), str(tmp_path / "Qwen3-1.7B")


def build_nothing(monkeypatch, tools=("nvcc", "ninja")):
    """No module is compiled, and only these tools are there."""
    monkeypatch.setattr(doctor_pair, "is_built", lambda module: False)
    for name in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC"):
        monkeypatch.delenv(name, raising=False)
    found = {name: f"/bin/{name}" for name in tools}
    monkeypatch.setattr(doctor_pair.shutil, "which", found.get)


def test_modules_are_those_of_the_models_heads(pair):
    """Red if the kernel that decodes few query heads to a KV head, or Hopper's own for
    prompts, is forgotten."""
    pytest.importorskip("flashinfer")
    target, draft = (doctor_pair.flashinfer_modules(p, 8) for p in pair)
    assert len(target) == 1 and "prefill" in target[0]
    assert len(draft) == 2 and "batch_decode" in draft[1]
    assert doctor_pair.flashinfer_modules(pair[0], 9)[-1].endswith("_sm90")
    assert all("head_dim_qk_128" in name for name in target + draft)


def test_what_is_compiled_is_told_before_the_first_start(pair, monkeypatch):
    """Red if minutes of compilation come as a surprise."""
    pytest.importorskip("flashinfer")
    build_nothing(monkeypatch)
    text = doctor_pair.kernels_sentence(pair, 9)
    assert text.startswith("FlashInfer compiles 3 attention modules (")
    assert "/bin/nvcc" in text and "/bin/ninja" in text
    monkeypatch.setattr(doctor_pair, "is_built", lambda module: True)
    assert "has all 3" in doctor_pair.kernels_sentence(pair, 9)


@pytest.mark.parametrize(("tools", "lacks"), [(["nvcc"], "ninja"), (["ninja"], "nvcc")])
def test_a_missing_tool_is_told(tools, lacks, pair, monkeypatch):
    """Red if a first start fails while it compiles, and doctor found nothing."""
    pytest.importorskip("flashinfer")
    build_nothing(monkeypatch, tools)
    with pytest.raises(ValueError, match=f"finds no {lacks}; install"):
        doctor_pair.kernels_sentence(pair, 9)


def test_a_module_in_the_cache_is_not_compiled(tmp_path, monkeypatch):
    """Red if a warm cache is not seen."""
    env = pytest.importorskip("flashinfer.jit.env")
    monkeypatch.setattr(env, "FLASHINFER_JIT_DIR", tmp_path)
    assert not doctor_pair.is_built("one")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "one.so").touch()
    assert doctor_pair.is_built("one")


def test_memory_of_a_pair(pair):
    """Red if a pair that cannot start on a card is passed, or one that can is not."""
    h200 = doctor_pair.Memory(H200, 1)
    told = doctor_pair.memory_sentence(*pair, h200, 40960)
    assert "leave KV for about" in told and "--tp" not in told and "less" not in told
    with pytest.raises(ValueError, match=r"1 x 60.0 GB.*--tp"):
        doctor_pair.memory_sentence(*pair, doctor_pair.Memory(60 * 10**9, 1), 40960)
    two = doctor_pair.Memory(60 * 10**9, 2)
    assert "with --tp 2" in doctor_pair.memory_sentence(*pair, two, 40960)
    assert "less than one" in doctor_pair.memory_sentence(*pair, h200, 10**7)
    hub = ("org/a", "org/b")
    assert "not checked" in doctor_pair.memory_sentence(*hub, h200, 0)


def test_weights_are_those_of_the_files(pair):
    """Red if quantised weights count as 16-bit ones."""
    with open(f"{pair[0]}/model.safetensors", "wb") as f:
        f.truncate(10**10)
    one = doctor_pair.Memory(60 * 10**9, 1)
    told = doctor_pair.memory_sentence(*pair, one, 0)
    assert "weights take 13." in told


def test_the_embedded_pair_passes_here():
    """Red if doctor finds fault with the pair that the package ships."""
    pair = str(TARGET_PATH), str(DRAFT_PATH)
    assert "context lengths fit" in doctor.check_contexts(*pair)
    assert "leave KV for" in doctor.check_pair_memory(*pair)


def test_a_draft_that_reads_less_than_the_target_is_told(pair):
    """Red if the flag to set is not named before a start."""
    for path, most in zip(pair, (262144, 40960), strict=True):
        file = Path(path) / "config.json"
        config = json.loads(file.read_text()) | {"max_position_embeddings": most}
        file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="--context-length 40960 or less"):
        doctor.check_contexts(*pair)
