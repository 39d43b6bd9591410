"""The kinds of heads: where each comes from, and what it reads of its target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.configs.draft_parallel import DraftTPExecution

from sglang_parse.drafting.block_head import BlockHead, MarkovBlockHead
from sglang_parse.drafting.drafter import DrafterContext
from sglang_parse.drafting.head_model import HeadModel
from sglang_parse.options.table import EAGLE3, MTP, flag_name
from sglang_parse.sgl.compat.model_changes import show_layers
from sglang_parse.sgl.mtp import check_mtp


class EagleHead(HeadModel):
    """The head of `--speculative-parse-eagle-model-path`, which reads three layers.

    Source: arXiv:2503.01840; sglang/srt/models/llama_eagle3.py.
    """

    name = EAGLE3
    execution = DraftTPExecution.SINGLE_GROUP
    #: The option that names it.
    option = "eagle_model_path"

    def __init__(self, context: DrafterContext) -> None:
        """Also has the target show its hidden states."""
        flag, target = flag_name(self.option), context.target
        path = getattr(context.config, self.option)
        super().__init__(context, path=path, revision=None, flag=flag)
        show_layers(target, flag, head_config=self.runner.model_config.hf_config)
        layers = getattr(self.model.model, "num_aux_hidden_states", 3)
        self.set_width(layers * target.model_config.hidden_size)

    def takes_lm_head(self) -> bool:
        return bool(getattr(self.model, "load_lm_head_from_target", False))


class MtpHead(HeadModel):
    """The head for multi-token prediction in its target's own checkpoint.

    It reads the target's final hidden state, and its own in a chain.
    Source: arXiv:2412.19437, 2.2; sglang/srt/models/deepseek_nextn.py.
    """

    name = MTP
    #: The option that asks for it.
    option = "compose"

    def __init__(self, context: DrafterContext) -> None:
        """Raises ValueError where the checkpoint has no such head."""
        # SGLang has fetched the checkpoint by now, where it was not here before.
        path, revision = check_mtp(context.server_args, self.option)
        flag = f"{flag_name(self.option)} {MTP}"
        super().__init__(context, path=path, revision=revision, flag=flag)
        self.set_width(context.target.model_config.hidden_size)


class _OfDraft(HeadModel):
    """A head of the draft model, which is its target. Where its graphs differ from
    plain forwards, the draft agrees less often; no proof is needed."""

    step_path = prefill_path = ""

    @contextmanager
    def on_ranks(self) -> Iterator[None]:
        """Its draft is there already."""
        yield


class DraftEagleHead(_OfDraft, EagleHead):
    option = "draft_eagle_model_path"


class DraftMtpHead(_OfDraft, MtpHead):
    option = "draft_compose"


#: By the name that `--speculative-parse-compose` has for it.
HEADS: dict[str, type[EagleHead | MtpHead | BlockHead]] = {
    head.name: head for head in (EagleHead, MtpHead, BlockHead, MarkovBlockHead)
}
#: By the name that `--speculative-parse-draft-compose` has for it.
DRAFT_HEADS: dict[str, type[DraftEagleHead | DraftMtpHead]] = {
    EAGLE3: DraftEagleHead,
    MTP: DraftMtpHead,
}
