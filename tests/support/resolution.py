"""SGLang's resolution of a command line, without a server."""

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH

TARGET = ("--model-path", str(TARGET_PATH), "--speculative-algorithm", "PARSE")
DRAFT = ("--speculative-draft-model-path", str(DRAFT_PATH))


def resolve(*flags: str):
    """ServerArgs of a command line after SGLang's resolution. Needs the `plugins`
    fixture."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args([*flags])
    args.resolve_once()
    return resolving_view(args)
