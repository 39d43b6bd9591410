"""Builds what a PARSE server consists of, from the server's arguments to the engine.

SGLang starts a worker in two steps. `open_parts` runs before the KV pools exist and
loads models; `build_batches` runs after them and puts the engine together.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang.srt.arg_groups.model_override_base import (
    attention_backends_of,
    resolved_view,
)
from sglang.srt.runtime_context import get_memory, get_parallel

from sglang_parse.client_texts.client_pass import ClientPass
from sglang_parse.drafting.create_drafters import create_drafters
from sglang_parse.drafting.drafter import Drafter, DrafterContext, DrafterResources
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.drafting.thinking import closing_ids
from sglang_parse.engine.failures import ExtensionErrors, GuardedDrafters
from sglang_parse.engine.prefill import PrefillEngine
from sglang_parse.engine.round import RoundEngine
from sglang_parse.engine.segmenting import Segmenting, padded_texts
from sglang_parse.judging.judges import ServerJudge, open_judge
from sglang_parse.judging.segmenter import build_token_texts
from sglang_parse.options.judge_names import QUESTION_JUDGE
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.validation import shown
from sglang_parse.plugin.batches import Batches
from sglang_parse.plugin.ending import refuse
from sglang_parse.plugin.flags import config_from_server_args
from sglang_parse.plugin.model_checks import penalty_sentence
from sglang_parse.policy.planner import RoundPlanner
from sglang_parse.probe.open_probe import OpenedProbe, open_probe
from sglang_parse.probe.probe_verdicts import RoundParts
from sglang_parse.reporting import telemetry
from sglang_parse.requests.request_states import RequestStates
from sglang_parse.sgl.architecture import check_architecture
from sglang_parse.sgl.capacity import longest_pass, longest_prefill
from sglang_parse.sgl.compat.request_changes import bar_from_cache, hold, release
from sglang_parse.sgl.families import family_of
from sglang_parse.sgl.ranks import Ranks
from sglang_parse.sgl.slots import RoundSlots
from sglang_parse.sgl.tokenizers import load_tokenizer
from sglang_parse.sgl.views import batch_view
from sglang_parse.verify.model import TargetModel
from sglang_parse.verify.passes import TargetVerifier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What exists before the KV pools: models, judge, segmenter, request states."""

    config: ParseConfig
    server_args: Any
    ranks: Ranks
    telemetry: telemetry.Telemetry
    errors: ExtensionErrors
    verifier: TargetVerifier
    drafters: tuple[Drafter, ...]
    segmenting: Segmenting
    judge: ServerJudge
    requests: RequestStates
    probe: OpenedProbe

    @property
    def context_len(self) -> int:
        """Of the target, in tokens."""
        return int(self.verifier.runner.model_config.context_len)

    @property
    def draft_runners(self) -> list[DraftRunner]:
        """Models that draft; the draft model comes first, as SGLang expects."""
        return [r for drafter in reversed(self.drafters) for r in drafter.runners]


def open_parts(
    server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any
) -> Parts:
    """Load the models that draft, the judge and the probe.

    Raises ValueError where the target's architecture or an option cannot be served.
    """
    config: ParseConfig = config_from_server_args(server_args)
    runner = target_worker.model_runner
    tokenizer = target_worker.tokenizer
    if tokenizer is None:  # --skip-tokenizer-init: segments and judge still need it
        tokenizer = load_tokenizer(server_args, of_draft=False)
    model_config = runner.model_config
    name = model_config.hf_config.architectures[0]
    check_architecture(
        runner,
        "--model-path",
        # What SGLang has chosen itself is not in the record that it was given.
        backends=attention_backends_of(resolved_view(server_args)),
        head=config.compose if config.composes else "",
        brings_back=get_memory().enable_hierarchical_cache,
    )
    if told := penalty_sentence(model_config.get_default_sampling_params()):
        logger.warning(told)
    ranks = Ranks(get_parallel().tp_group)
    counters = telemetry.start(
        config,
        server_args,
        is_first_rank=get_parallel().tp_rank == 0,
        dp_rank=get_parallel().dp_rank,
    )
    errors = ExtensionErrors(partial(counters.count, "extension_errors", 1))
    verifier = TargetVerifier(target_worker, runner.spec_algorithm)
    drafters = create_drafters(
        DrafterContext(
            config=config,
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            target=runner,
            context_len=model_config.context_len,
            vocab_size=model_config.vocab_size,
            ranks=ranks,
            tokenizer=tokenizer,
        ),
        errors.note,
    )
    for drafter in drafters:
        for drafting in drafter.runners:
            drafting.paths = verifier.paths
    counters.show(verifier.paths)
    verifier.shows_features = any(d.reads_features for d in drafters)
    texts = padded_texts(build_token_texts(tokenizer), model_config.vocab_size)
    judge = open_judge(config.judge, tokenizer, config.verdict_pairs)
    writes = ranks.is_first and not get_parallel().dp_rank
    probe = open_probe(server_args, config, judge, verifier, writes=writes)
    counters.guard = probe.guard
    requests = RequestStates(
        config,
        tokenizer,
        frozenset(model_config.hf_eos_token_id or ()),
        judge.ask,
        has_draft_model=any(not d.token_level for d in drafters),
        has_token_level=any(d.token_level for d in drafters),
        refuse=refuse,
        judge_kind=probe.judge_kind,
        no_verdicts="sparse_attention" if family_of(name).chains else "",
    )
    if requests.no_verdicts:
        logger.warning(
            "PARSE: %s is served in exact at most, because its sparse attention gives "
            "no verdicts; reports of semantic requests say sparse_attention.",
            name,
        )
    counters.held = requests.count
    logger.info(
        "PARSE serves mode %s; a verdict asks %s in %d tokens; options that differ "
        "from the defaults: %s",
        config.mode,
        shown(config.judge_suffix) if judge.name == QUESTION_JUDGE else judge.name,
        len(judge.ask(config.judge_suffix).suffix),
        config.changes or "none",
    )
    return Parts(
        config=config,
        server_args=server_args,
        ranks=ranks,
        telemetry=counters,
        errors=errors,
        verifier=verifier,
        drafters=tuple(drafters),
        segmenting=Segmenting(config, texts, errors.note, closing_ids(tokenizer)),
        judge=judge,
        requests=requests,
        probe=probe,
    )


def build_batches(parts: Parts, req_to_token_pool: Any, allocator: Any) -> Batches:
    """The engine, on top of models, pools and drafters."""
    slots = _open_slots(parts, req_to_token_pool, allocator)
    _open_drafters(parts, slots)
    target = TargetModel(parts.verifier, slots)
    count = partial(parts.telemetry.count, "extension_errors", 1, "drafter")
    guarded = GuardedDrafters(parts.drafters, count)
    engine = RoundEngine(
        target=target,
        slots=slots,
        drafters=guarded,
        view=batch_view,
        planner=RoundPlanner(
            parts.config,
            parts.ranks,
            slots,
            parts.drafters,
            context_len=parts.context_len,
        ),
        segmenting=parts.segmenting,
        ranks=parts.ranks,
        verdicts=parts.probe.verdicts(
            RoundParts(
                target,
                slots,
                parts.ranks,
                batch_view,
                parts.judge.scores,
                parts.errors.note,
            )
        ),
    )
    client_pass = ClientPass(
        engine,
        context_len=parts.context_len,
        view=batch_view,
        refuse=refuse,
        bar=bar_from_cache,
        hold=hold,
        release=release,
        step_rows=longest_prefill(),
    )
    return Batches(
        engine,
        prefills=PrefillEngine(
            target=target,
            drafters=guarded,
            client_pass=client_pass,
            brings_back=slots.brings_back,
        ),
        client_pass=client_pass,
        requests=parts.requests,
        telemetry=parts.telemetry,
    )


def _open_slots(parts: Parts, req_to_token_pool: Any, allocator: Any) -> RoundSlots:
    return RoundSlots(
        req_to_token_pool,
        allocator,
        max_rows=parts.ranks.agree(longest_pass()),
        brings_back=get_memory().enable_hierarchical_cache,
    )


def _open_drafters(parts: Parts, slots: RoundSlots) -> None:
    resources = DrafterResources(
        slots=slots,
        num_slots=slots.last_slot,
        features_of=parts.verifier.features_of,
    )
    for drafter in parts.drafters:
        drafter.open(resources)
