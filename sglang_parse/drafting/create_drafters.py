"""The drafters of a server, in the order of their turns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

from sglang.srt.environ import envs

from sglang_parse.drafting.draft_model import DraftModel
from sglang_parse.drafting.drafter import Drafter, DrafterContext
from sglang_parse.drafting.extension import (
    DRAFTER_EXTENSIONS,
    ExtensionDrafter,
    create_extension_drafters,
)
from sglang_parse.drafting.head import HeadDrafter
from sglang_parse.drafting.model_drafter import ModelDrafter
from sglang_parse.drafting.ngram import NgramDrafter
from sglang_parse.drafting.text_drafter import TextDrafter
from sglang_parse.drafting.vocabularies import match_of
from sglang_parse.options.extensions import ExtensionError
from sglang_parse.options.table import HEAD_PATHS, MTP
from sglang_parse.sgl.model_folder import context_length
from sglang_parse.sgl.mtp import MODELS

logger = logging.getLogger(__name__)


def _draft_model(context: DrafterContext) -> Drafter | None:
    """The draft model; it drafts in text where its ids are not the target's."""
    server_args = context.server_args
    if not server_args.speculative_draft_model_path:
        return None
    match = match_of(server_args)
    logger.info("PARSE: draft and target: %s", match)
    drafter: ModelDrafter | TextDrafter
    if match.shares_ids:
        model = DraftModel(
            context,
            vocab_size=context.vocab_size,
            context_len=_reach(context),
            match=match,
        )
        drafter = ModelDrafter(model)
    else:
        drafter = TextDrafter.create(context)
    if (reach := drafter.model.reach) < context.context_len:
        logger.warning(
            "PARSE: the draft model reads %d tokens and the target %d; longer requests "
            "go on without it.",
            reach,
            context.context_len,
        )
    return drafter


def _reach(context: DrafterContext) -> int:
    """Tokens that the draft model is to read: no more than its target, and than itself
    unless SGLang's environment says that it can."""
    own = context_length(context.server_args.speculative_draft_model_path)
    if own is None or envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
        return context.context_len
    return min(own, context.context_len)


#: One line for each drafter. `create` returns None where no flag asks for it.
DRAFTERS: tuple[Callable[[DrafterContext], Drafter | None], ...] = (
    NgramDrafter.create,
    HeadDrafter.create,
    _draft_model,
)
#: An extension of our own, loaded where `--speculative-parse-draft-url` is set.
REMOTE = EntryPoint(
    "remote",
    "sglang_parse.remote.remote_drafter:RemoteDrafter.create",
    DRAFTER_EXTENSIONS.group,
)


def create_drafters(
    context: DrafterContext,
    on_error: Callable[[ExtensionError], None] = lambda error: None,
) -> list[Drafter]:
    """The drafters that flags ask for, and those of installed packages.

    Drafters that work token by token come first, then extensions, the draft model last.

    on_error: told what a package's drafter raises where the engine does not look.
    """
    built_in = [create(context) for create in DRAFTERS]
    made = [drafter for drafter in built_in if drafter is not None]
    extra: list[Drafter] = [*create_extension_drafters(context, on_error)]
    if context.config.draft_url:
        remote = REMOTE.load()(context)
        extra.append(ExtensionDrafter(remote, context.vocab_size, on_error))
    return [
        *(d for d in made if d.token_level),
        *(d for d in extra if d.token_level),
        *(d for d in extra if not d.token_level),
        *(d for d in made if not d.token_level),
    ]


def models_of(server_args: Any, config: Any) -> list[tuple[str, str | None, bool]]:
    """(path, revision, whether it is a head) of every model that drafts, for the memory
    budget."""

    def read(option: str) -> tuple[str, str | None]:
        path, revision = (getattr(server_args, field) for field in MODELS[option])
        return path, revision

    found = [
        (*read("draft_compose"), False),
        *((getattr(config, option), None, True) for option in HEAD_PATHS),
        *((*read(option), True) for option in MODELS if getattr(config, option) == MTP),
    ]
    return [one for one in found if one[0]]
