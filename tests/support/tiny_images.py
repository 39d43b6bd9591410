"""Images for the tiny multimodal models, as SGLang's tokenizer process sends them."""

from typing import Any

import torch
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)

from tests.support.tiny_models import IMAGE, VIDEO, VISION_END, VISION_START

PATCH, MERGE = 4, 2


def before_images(ids: list[int]) -> list[int]:
    """An answer up to where random weights write an image's token, which Hugging Face
    takes for an image."""
    return ids[: ids.index(IMAGE)] if IMAGE in ids else ids


class ImagePrompt:
    """A prompt with one Qwen-VL image of random pixels in its middle."""

    def __init__(
        self, prompt: list[int], model_type: str, *, height: int, width: int, seed: int
    ) -> None:
        """height, width: in patches of the vision model, each even."""
        generator = torch.Generator().manual_seed(seed)
        self.grid = torch.tensor([[1, height, width]])
        # A patch has its pixels of two frames in three colours.
        shape = (height * width, 3 * 2 * PATCH * PATCH)
        self.pixels = torch.randn(shape, generator=generator)
        num = height * width // MERGE**2
        half = len(prompt) // 2
        image = [VISION_START, *[IMAGE] * num, VISION_END]
        self.ids = [*prompt[:half], *image, *prompt[half:]]
        self.offsets = [(half + 1, half + num)]
        self.model_type = model_type

    def mm_inputs(self) -> MultimodalProcessorOutput:
        """What goes to the scheduler beside the token ids."""
        positions, delta = MRotaryEmbedding.get_rope_index(
            spatial_merge_size=MERGE,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=VISION_START,
            model_type=self.model_type,
            tokens_per_second=2,
            input_ids=torch.tensor([self.ids]),
            image_grid_thw=self.grid,
        )
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            feature=self.pixels,
            offsets=self.offsets,
            model_specific_data={"image_grid_thw": self.grid},
        )
        return MultimodalProcessorOutput(
            mm_items=[item],
            im_token_id=IMAGE,
            im_start_id=VISION_START,
            im_end_id=VISION_END,
            video_token_id=VIDEO,
            mrope_positions=positions.squeeze(1),
            mrope_position_delta=delta,
        )

    def witness_inputs(self, num_more: int) -> dict[str, Any]:
        """Arguments of Hugging Face's model for the prompt and `num_more` tokens."""
        kinds = torch.tensor([[int(t == IMAGE) for t in self.ids] + [0] * num_more])
        return {
            "pixel_values": self.pixels,
            "image_grid_thw": self.grid,
            "mm_token_type_ids": kinds,
        }
