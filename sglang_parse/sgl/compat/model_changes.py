"""Changes to how SGLang builds and runs a model: hidden states, media, devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
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


def show_layers(
    target: Any, flag: str, *, head_config: Any = None, layers: Sequence[int] = ()
) -> ShownLayers:
    """Make the target return hidden states of some layers beside the final ones.

    target: its ModelRunner. head_config: the Hugging Face config of an EAGLE-3 head,
    which may name the layers that it was trained on. layers: more of them, from 1 to
    one below their number, which are shown in front of. Call it before graphs are
    captured, for a head first. Raises ValueError naming `flag`.

    What: layers of the target's model are marked, `model.layers_to_capture`, and shown
    by rising number; its logits processor keeps the final hidden states beside theirs,
    for the LM head.
    Why: SGLang does both for its own algorithms only, and verdicts read other layers
    than a head.
    Where: model_runner_components/attention_backend_setup.py,
    `configure_aux_hidden_state_capture`; models/llama.py,
    `set_eagle3_layers_to_capture`, which adds one to each number;
    layers/logits_processor.py, `keep_last_hidden_states`.
    Ends with: a method of CustomSpecAlgo that requests hidden states.
    """
    model = target.model
    can_show = hasattr(model, "set_eagle3_layers_to_capture")
    if head_config is not None and can_show:
        eagle = getattr(head_config, "eagle_config", None) or {}
        configure_aux_hidden_state_capture(
            model=model,
            eagle_use_aux_hidden_state=True,
            eagle_aux_hidden_state_layer_ids=eagle.get(
                "eagle_aux_hidden_state_layer_ids"
            ),
            dflash_use_aux_hidden_state=False,
            dflash_target_layer_ids=None,
            is_dspark=False,
        )
    inner = getattr(model, "model", None)
    head = tuple(sorted(getattr(inner, "layers_to_capture", None) or ()))
    wanted = tuple(sorted({*head, *layers}))
    if layers and can_show:
        model.set_eagle3_layers_to_capture([layer - 1 for layer in wanted])
    shown = tuple(getattr(inner, "layers_to_capture", None) or ())
    if not can_show or (layers and shown != wanted):
        which = f" of layers {', '.join(map(str, layers))}" if layers else ""
        raise ValueError(
            f"{flag}: {type(model).__name__} cannot show its hidden states{which}; "
            "choose a target that SGLang serves with EAGLE3."
        )
    model.logits_processor.keep_last_hidden_states = True
    return ShownLayers(wanted, head, target.model_config.hidden_size)


@dataclass(frozen=True)
class States:
    """Hidden states of a forward, [tokens, width] each."""

    final: Tensor
    #: Of the layers that the target shows (`show_layers`), side by
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
def loaded_as_it_is(*, is_head: bool) -> Iterator[None]:
    """Have SGLang take a draft for the model that its checkpoint names.

    is_head: whether it is to be a head; then nothing changes.

    What: inside the block a ModelConfig keeps a draft's architecture, and says of no
    layers for multi-token prediction.
    Why: to SGLang a draft of some architectures is the head in its target's checkpoint,
    and has as many layers as the config says of heads.
    Where: configs/model_config.py, `_config_draft_model` and `_derive_model_shapes`;
    model_runner_components/layer_setup.py, `_compute_model_num_layers`.
    Ends with: a flag that says whether a draft is a head.
    """
    if is_head:
        yield
        return
    names = ("_config_draft_model", "_derive_model_shapes")
    kept = [getattr(ModelConfig, name) for name in names]

    def derive(config: ModelConfig) -> None:
        kept[1](config)
        config.num_nextn_predict_layers = None

    ModelConfig._config_draft_model = lambda config: None
    ModelConfig._derive_model_shapes = derive
    try:
        yield
    finally:
        for name, method in zip(names, kept, strict=True):
            setattr(ModelConfig, name, method)


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Let SGLang hand a target's weights to a head on a CPU as on a GPU.

    device: of the models. Nothing changes where it is another than the CPU.

    What: inside the block `torch.cuda.synchronize` does nothing.
    Why: models of heads wait for a GPU when they take the target's weights.
    Where: models/deepseek_v2.py and glm4_moe.py, `set_embed_and_head`.
    Ends with: models that ask SGLang's platform to wait, as models/llama.py does.
    """
    if device != "cpu":
        yield
        return
    wait = torch.cuda.synchronize
    torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.synchronize = wait
