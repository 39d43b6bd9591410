"""Changes to how SGLang builds and runs a model: hidden states, media, devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
    configure_aux_hidden_state_capture,
)
from torch import Tensor


def wait_in_gathers(logits_processor: Any) -> None:
    """Let tensor-parallel ranks wait for each other before they gather logits.

    What: the entry barrier of the processor's gatherer is switched on.
    Why: SGLang leaves the barrier out, which is safe where a forward lies between two
    gathers into the same buffer. `TargetVerifier.logits_at` gathers right after a pass.
    Where: distributed/device_communicators/triton_symm_mem_ag.py,
    `MultimemAllGatherer`.
    Ends with: a gather that may follow another one.
    """
    gatherer = getattr(logits_processor, "_logits_gatherer", None)
    if gatherer is not None:
        gatherer._skip_entry_sync = False


def capture_features(target: Any, head_config: Any, flag: str) -> None:
    """Make the target return the hidden states that an EAGLE-3 head was trained on.

    target: its ModelRunner. head_config: the head's Hugging Face config, which may name
    the layers. Call it before graphs are captured. Raises ValueError naming `flag`.

    What: layers of the target's model are marked, and its logits processor keeps the
    final hidden states beside theirs, for the LM head.
    Why: SGLang does both for its own algorithms only.
    Where: model_runner_components/attention_backend_setup.py,
    `configure_aux_hidden_state_capture`; layers/logits_processor.py,
    `keep_last_hidden_states`.
    Ends with: a method of CustomSpecAlgo that requests hidden states.
    """
    model = target.model
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise ValueError(
            f"{flag}: {type(model).__name__} cannot show an EAGLE-3 head its hidden "
            "states; choose a target that SGLang serves with EAGLE3."
        )
    eagle = getattr(head_config, "eagle_config", None) or {}
    configure_aux_hidden_state_capture(
        model=model,
        eagle_use_aux_hidden_state=True,
        eagle_aux_hidden_state_layer_ids=eagle.get("eagle_aux_hidden_state_layer_ids"),
        dflash_use_aux_hidden_state=False,
        dflash_target_layer_ids=None,
        is_dspark=False,
    )
    model.logits_processor.keep_last_hidden_states = True


@dataclass(frozen=True)
class ShownLayers:
    """Hidden states that the target shows: in front of each of these layers, rising."""

    layers: tuple[int, ...]
    #: Those that an EAGLE-3 head reads; empty without a head.
    head: tuple[int, ...]
    hidden_size: int

    def columns(self, layers: Sequence[int]) -> list[int]:
        """Columns of what is shown that hold these layers."""
        size = self.hidden_size
        starts = [self.layers.index(one) * size for one in layers]
        return [start + k for start in starts for k in range(size)]


def show_layers(target: Any, layers: Sequence[int], flag: str) -> ShownLayers:
    """Make the target return the hidden states in front of more layers.

    target: its ModelRunner, after `capture_features` if there is a head. layers: from
    1 to one below their number. Call it before graphs are captured. Raises ValueError
    naming `flag`.

    What: the layers in `model.layers_to_capture` become those of the head and these;
    they are shown by rising number.
    Why: verdicts read other layers than a head, and SGLang marks a head's only.
    Where: models/llama.py, `set_eagle3_layers_to_capture`, which adds one to each
    number; layers/logits_processor.py, `keep_last_hidden_states`.
    Ends with: a method of CustomSpecAlgo that requests hidden states.
    """
    model = target.model
    size: int = target.model_config.hidden_size
    head = tuple(sorted(getattr(model.model, "layers_to_capture", None) or ()))
    wanted = tuple(sorted({*head, *layers}))
    if hasattr(model, "set_eagle3_layers_to_capture"):
        model.set_eagle3_layers_to_capture([layer - 1 for layer in wanted])
    shown = getattr(model.model, "layers_to_capture", None)
    if tuple(shown or ()) != wanted:
        raise ValueError(
            f"{flag}: {type(model).__name__} cannot show the hidden states of layers "
            f"{', '.join(map(str, layers))}; choose a target that SGLang serves with "
            "EAGLE3."
        )
    model.logits_processor.keep_last_hidden_states = True
    return ShownLayers(wanted, head, size)


@dataclass(frozen=True)
class States:
    """Hidden states of a forward, [tokens, width] each."""

    final: Tensor
    #: Of the layers that the target shows (`capture_features`, `show_layers`), side by
    #: side; None where it shows none.
    layers: Tensor | None

    @classmethod
    def of(cls, output: LogitsProcessorOutput) -> States:
        """Those of a forward that captures all. With layers shown, SGLang puts the
        final ones elsewhere."""
        found, final = output.hidden_states, output.last_hidden_states
        return cls(found, None) if final is None else cls(final, found)


def take_states(output: LogitsProcessorOutput, rows: Tensor | None) -> States:
    """The hidden states of a prefill that captures all, taken out of its output.

    rows: [n] int64 tokens whose final hidden states the scheduler is to see, None for
    all.

    What: the final hidden states, [n, hidden], are where SGLang expects them.
    Why: with layers shown, `hidden_states` holds those, and the scheduler sends
    `hidden_states` to clients that ask for them.
    Where: layers/logits_processor.py, `_get_last_hidden_states_to_store`.
    Ends with: a field of its own for the layers.
    """
    states = States.of(output)
    output.hidden_states = states.final if rows is None else states.final[rows]
    return states


def hide_media(model_config: Any, *, images: bool) -> None:
    """Have a server say that its model reads no audio and, unless `images`, no images.

    model_config: of SGLang's TokenizerManager.

    What: clears `is_audio_understandable_model` and `is_image_understandable_model`.
    Why: SGLang warms a server up with an image if its model is said to read images,
    and ends it if that request fails. PARSE refuses such requests of most families.
    Where: entrypoints/http_server.py, `_execute_server_warmup`;
    configs/model_config.py, `ModelConfig`.
    Ends with: a warm-up that a plugin may choose.
    """
    model_config.is_audio_understandable_model = False
    if not images:
        model_config.is_image_understandable_model = False


@contextmanager
def taken_for_triton(name: str) -> Iterator[None]:
    """Let SGLang take the attention backend `name` for Triton inside the block.

    What: replaces `attention_backends_of` of the module that checks backends by name.
    Why: the checks of single models list the backends that can serve sliding windows
    and sinks. Ours can, as Triton can, and no plugin may add to the lists.
    Where: arg_groups/model_hook.py, `handle_model_specific_adjustments`.
    Ends with: a list of backends that plugins may add to.
    """
    from sglang.srt.arg_groups import model_hook

    found = model_hook.attention_backends_of

    def answer(view: Any) -> tuple[str, ...]:
        return tuple("triton" if one == name else one for one in found(view))

    model_hook.attention_backends_of = answer
    try:
        yield
    finally:
        model_hook.attention_backends_of = found


@contextmanager
def built_on_cpu() -> Iterator[None]:
    """Give the CPU to a model that reads torch's current device.

    What: replaces `torch.get_device_module` inside the block.
    Why: a torch that was built for CUDA answers with CUDA where there is no GPU.
    Where: models/qwen3_next.py and models/qwen3_5.py, `norm`.
    Ends with: layers that take SGLang's device.
    """
    found = torch.get_device_module

    def answer(device: Any = None) -> Any:
        return found("cpu" if device is None else device)

    torch.get_device_module = answer  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.get_device_module = found


@contextmanager
def waits_for_no_gpu(device: str) -> Iterator[None]:
    """Let models of heads take the target's weights inside the block on a CPU too.

    device: of the models.

    What: `torch.cuda.synchronize` does nothing inside the block on a CPU.
    Why: they wait there for a GPU, whatever the device.
    Where: models/deepseek_v2.py, glm4_moe.py and qwen3_next.py, `set_embed_and_head`.
    Ends with: models that ask SGLang's platform to wait, as models/llama.py does.
    """
    wait = torch.cuda.synchronize
    if device == "cpu":
        torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.synchronize = wait
