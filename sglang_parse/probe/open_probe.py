"""Opens the probe of a server: its file, its layers, its guard and its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_parse.engine.verdict_source import SuffixVerdicts, VerdictSource
from sglang_parse.judging.judges import ServerJudge
from sglang_parse.options.judge_names import QUESTION_JUDGE
from sglang_parse.options.request import RequestOptions
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.table import flag_name
from sglang_parse.options.validation import shown
from sglang_parse.probe.linear_probe import Learnt, Probe, ProbeError, usual_layers
from sglang_parse.probe.pair_file import PairFile
from sglang_parse.probe.probe_file import load_probe
from sglang_parse.probe.probe_guard import ProbeGuard
from sglang_parse.probe.probe_verdicts import ProbeVerdicts, RoundParts
from sglang_parse.probe.target_fingerprint import fingerprint


@dataclass(frozen=True)
class OpenedProbe:
    """What a server reads of hidden states: nothing by default."""

    config: ParseConfig
    probe: Probe | None = None
    guard: ProbeGuard | None = None
    pairs: PairFile | None = None

    def judge_kind(self, options: RequestOptions) -> str:
        """What gives a request's verdicts: `suffix` or `probe`.

        Raises ValueError where it requires a probe that there is not.
        """
        if options.mode != "semantic":
            return "suffix"
        if options.client_text:
            told = "and its text is a client's, which the question judges"
        elif self.probe is None:
            told = f"and this server has no {flag_name('probe')}"
        else:
            reason = self.probe.misfit(
                question=options.judge_suffix,
                threshold=options.threshold,
                segmenter=options.segmenter,
            )
            told = f"and this server's probe {reason}" if reason else ""
        if told and options.judge == "probe":
            raise ValueError(
                f"custom_params.parse_judge is 'probe' {told}; expected 'suffix' or "
                "'auto'."
            )
        return "suffix" if told or options.judge == "suffix" else "probe"

    def verdicts(self, parts: RoundParts) -> VerdictSource:
        if self.probe is None and self.pairs is None:
            return SuffixVerdicts(parts.judge, parts.on_error)
        return ProbeVerdicts(
            parts.judge,
            parts.on_error,
            self.probe,
            self.guard,
            self.pairs,
            self.config.judge_suffix,
        )


def open_probe(
    server_args: Any,
    config: ParseConfig,
    judge: ServerJudge,
    verifier: Any,
    *,
    writes: bool = True,
) -> OpenedProbe:
    """Read the server's probe, and have passes show what it reads.

    verifier: the `TargetVerifier`, before graphs are captured. writes: whether this
    rank writes pairs. Raises ValueError where the target cannot show what is read, or
    the probe is for another target or question.
    """
    probe = read_probe(server_args, config)
    if probe is None and not config.probe_collect:
        return OpenedProbe(config)
    model = verifier.runner.model_config
    layers = usual_layers(model.num_hidden_layers)
    flag = flag_name("probe_collect")
    if probe is not None:
        flag, layers = flag_name("probe"), probe.layers
        suffix = judge.ask(config.judge_suffix).suffix
        for name, has, expected in (
            ("layers", layers, range(1, model.num_hidden_layers)),
            ("hidden_size", (probe.hidden_size,), (model.hidden_size,)),
            ("suffix", (probe.learnt.suffix,), (tuple(suffix),)),
        ):
            if wrong := [one for one in has if one not in expected]:
                raise ValueError(
                    f"{flag} {config.probe!r} has the {name} {shown(wrong[0])}; this "
                    f"target has {shown(expected)}."
                )
    verifier.show_layers(layers, flag)
    guard = None
    if probe is not None and config.probe_check:
        guard = ProbeGuard(share=config.probe_check, least=config.probe_agreement)
    pairs = None
    if config.probe_collect:
        pairs = _open_pairs(server_args, config, layers, judge, model, writes=writes)
    return OpenedProbe(config, probe, guard, pairs)


def _open_pairs(
    server_args: Any,
    config: ParseConfig,
    layers: Sequence[int],
    judge: ServerJudge,
    model_config: Any,
    *,
    writes: bool,
) -> PairFile:
    """Raises ValueError where the target has no fingerprint, or nothing is written."""
    target = fingerprint(server_args.model_path, getattr(server_args, "revision", None))
    suffix = judge.ask(config.judge_suffix).suffix
    learnt = Learnt(target, config.judge_suffix, tuple(suffix), config.threshold)
    about = {"learnt": asdict(learnt), "layers": list(layers)}
    about["hidden_size"] = model_config.hidden_size
    path = config.probe_collect
    try:
        return PairFile(path if writes else "", about)
    except OSError as e:
        raise ValueError(
            f"{flag_name('probe_collect')} {path!r} cannot be written ({e.strerror}); "
            "expected a file in a folder that exists."
        ) from e


def check_probe_flags(server_args: Any, config: ParseConfig) -> None:
    """Raises ValueError, naming the flag, where a probe or pairs do not go with the
    server's other flags."""
    for name in ("probe", "probe_collect"):
        value = getattr(config, name)
        if value and config.judge != QUESTION_JUDGE:
            raise ValueError(
                f"{flag_name(name)} is {shown(value)} and {flag_name('judge')} is "
                f"{config.judge!r}; expected {QUESTION_JUDGE!r}, whose verdicts probes "
                "are trained on."
            )
    read_probe(server_args, config)


def read_probe(server_args: Any, config: ParseConfig) -> Probe | None:
    """The server's probe, None without one.

    Raises ValueError, naming the flag and the file, where the file is none or was
    trained for another target, question, threshold or segmenter than the server's.
    """
    if not config.probe:
        return None
    place = f"{flag_name('probe')} {config.probe!r}"
    path = server_args.model_path
    try:
        probe = load_probe(config.probe)
    except ProbeError as e:
        raise ValueError(f"{place} {e}.") from e
    try:
        target = fingerprint(path, getattr(server_args, "revision", None))
    except ValueError as e:
        raise ValueError(
            f"--model-path {path!r} {e}; expected a model folder with "
            f"{flag_name('probe')}, which is bound to its weights."
        ) from e
    if told := probe.misfit(target=target):
        raise ValueError(f"{place} {told}; expected one of --model-path {path!r}.")
    for name, told in (
        ("judge_suffix", probe.misfit(question=config.judge_suffix)),
        ("threshold", probe.misfit(threshold=config.threshold)),
        ("segmenter", probe.misfit(segmenter=config.segmenter)),
    ):
        if told:
            raise ValueError(
                f"{place} {told}, and {flag_name(name)} is "
                f"{getattr(config, name)!r}; expected the same."
            )
    return probe
