"""The drafters of a server, in the order of their turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_parse.drafting.base import Drafter, DrafterContext
from sglang_parse.drafting.draft_model import ModelDrafter
from sglang_parse.drafting.extension import create_extension_drafters
from sglang_parse.drafting.head import HeadDrafter
from sglang_parse.drafting.ngram import NgramDrafter
from sglang_parse.drafting.remote import RemoteDrafter
from sglang_parse.drafting.text_draft import TextDrafter
from sglang_parse.options.extensions import ExtensionError
from sglang_parse.options.table import MTP

#: One line a drafter. Each returns None where the server does not ask for it.
DRAFTERS: tuple[Callable[[DrafterContext], Drafter | None], ...] = (
    NgramDrafter.create,
    HeadDrafter.create,
    RemoteDrafter.create,
    ModelDrafter.create,
    TextDrafter.create,
)


def create_drafters(
    context: DrafterContext,
    on_error: Callable[[ExtensionError], None] = lambda error: None,
) -> list[Drafter]:
    """All drafters that the server's flags ask for, and those of installed packages.

    Those that work token by token come first, then the packages', the draft model last.

    on_error: told what a package's drafter raises where the engine does not look.
    """
    built_in = [create(context) for create in DRAFTERS]
    made = [drafter for drafter in built_in if drafter is not None]
    extra: Sequence[Drafter] = create_extension_drafters(context, on_error)
    return [
        *(d for d in made if d.token_level),
        *(d for d in extra if d.token_level),
        *(d for d in extra if not d.token_level),
        *(d for d in made if not d.token_level),
    ]


def models_of(server_args: Any, config: Any) -> list[tuple[str, str | None]]:
    """(path, revision) of every model that drafts, for the memory budget."""
    paths = [
        (
            server_args.speculative_draft_model_path,
            server_args.speculative_draft_model_revision,
        ),
        (config.eagle_model_path, None),
    ]
    if config.compose == MTP:
        paths.append((server_args.model_path, server_args.revision))
    return [(path, revision) for path, revision in paths if path]
