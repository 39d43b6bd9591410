"""A process that builds the embedded pair with captured graphs, and proves it
again and again, each time with another fault put in. Writes one line of JSON for each.

    python -m tests.support.proof_child FOLDER [sparse]

With `sparse` it is a tiny pair whose target has sparse attention.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch


def stale_length(replay):
    """A step attends by the lengths of the step before it."""
    held = {}

    def broken(self, key, batch, **kwargs):
        buffers = self.runner.buffers
        lens = (buffers.seq_lens, buffers.seq_lens_cpu)
        new = [one.clone() for one in lens]
        for one, old in zip(lens, held.get(id(self), new), strict=True):
            one.copy_(old)
        held[id(self)] = new
        return replay(self, key, batch, **kwargs)

    return broken


def stale_tokens(replay):
    """The tokens of a step never reach the buffer that it reads."""

    def broken(self, key, batch, **kwargs):
        self.runner.buffers.input_ids.fill_(1)
        return replay(self, key, batch, **kwargs)

    return broken


def stale_positions(replay):
    """The positions of a pass never reach the buffer that it reads."""

    def broken(self, key, batch, **kwargs):
        self.runner.buffers.positions.zero_()
        return replay(self, key, batch, **kwargs)

    return broken


def wrong_bucket(replay):
    """Another size is replayed than the one whose outputs are read."""

    def broken(self, key, batch, **kwargs):
        sizes = sorted((one for one in self.forwards), key=lambda one: one.size)
        at = [one.size for one in sizes].index(key.size) + 1
        replay(self, sizes[at % len(sizes)], batch, **kwargs)
        return self.outputs[key]

    return broken


def stale_states(replay):
    """A head's prefill never reads the target's hidden states."""

    def broken(self, key, batch, **kwargs):
        self.runner.static_draft_hidden_states.zero_()
        return replay(self, key, batch, **kwargs)

    return broken


def raises(*args, **kwargs):
    raise RuntimeError("a fault of the test")


def faults():
    """By name: what replaces what."""
    from sglang_parse.drafting.draft_model import DraftModel
    from sglang_parse.drafting.head_graphs import HeadGraphs
    from sglang_parse.verify import passes
    from sglang_parse.verify.backends import verify_backend, virtual
    from sglang_parse.verify.short_passes import ShortPasses
    from tests.support.cpu_graphs import ReplayBackend

    replay = ReplayBackend.replay

    def in_target(broken):
        def chosen(self, *args, **kwargs):
            is_draft = self.runner.model_runner.is_draft_worker
            return (replay if is_draft else broken)(self, *args, **kwargs)

        return chosen

    def in_drafts(broken):
        def chosen(self, *args, **kwargs):
            is_draft = self.runner.model_runner.is_draft_worker
            return (broken if is_draft else replay)(self, *args, **kwargs)

        return chosen

    def freed_early(plan, *, rows, scratch, table):
        # The suffixes write where the first request's context lies.
        taken = table[rows[0], : len(scratch)].to(torch.int64)
        return verify_backend.place_slots(plan, rows=rows, scratch=taken, table=table)

    decode = DraftModel.decode

    def shifted_rows(self, ids, rows, position, position_cpu, table):
        moved = int(len(rows.unique()) < len(rows))
        places = (position - moved, position_cpu - moved)
        return decode(self, ids, rows, *places, table)

    run = ShortPasses.run

    def shifted(self, round, plan):
        moved = plan.__class__(**{**vars(plan), "positions": plan.positions - 1})
        return run(self, round, moved)

    def short_slots(sequences, plan, slots):
        return virtual_slots(sequences, plan, slots).roll(1)

    virtual_slots = virtual.virtual_slots
    found: dict[str, tuple[str, list]] = {}

    def add(name: str, *changed) -> None:
        """name: the path that is to be off, and the fault."""
        found[name] = (name.split(":")[0], [changed] if changed else [])

    add("none")
    for path, where in (("target_steps", in_target), ("draft_steps", in_drafts)):
        for fault in (stale_length, stale_tokens, wrong_bucket):
            add(
                f"{path}: {fault.__name__}",
                ReplayBackend,
                "replay",
                where(fault(replay)),
            )
    for fault in (stale_tokens, stale_positions):
        broken = in_target(fault(replay))
        add(f"pass_graphs: {fault.__name__}", ReplayBackend, "replay", broken)
    states = in_drafts(stale_states(replay))
    add("head_prefills: stale_states", ReplayBackend, "replay", states)
    add("draft_steps: raises", ReplayBackend, "replay", in_drafts(raises))
    add("head_steps: states are not loaded", HeadGraphs, "load", lambda *_: None)
    add("route_mask: slot freed early", passes, "place_slots", freed_early)
    add("route_virtual: wrong slots", virtual, "virtual_slots", short_slots)
    add("short_passes: wrong place", ShortPasses, "run", shifted)
    add("guessed_rows: wrong place", DraftModel, "decode", shifted_rows)
    return found


def sparse_faults():
    """The same of a target with sparse attention."""
    from tests.support import sparse_attention

    best_of = sparse_attention.best_of

    def oldest(scores, num, rows):
        """Rows of one request attend to its first tokens, whatever their scores."""
        found = best_of(scores, num, rows)
        shares = len(rows.unique()) < len(rows) and len(rows) < 32
        return torch.arange(num).expand_as(found) if shares else found

    every = faults()
    names = ("none", "target_steps: stale_tokens", "short_passes: wrong place")
    fault = (sparse_attention, "best_of", oldest)
    return {name: every[name] for name in names} | {
        "short_passes: oldest tokens": ("short_passes", [fault])
    }


def embedded_pair(folder):
    from sglang_parse.embedded import DRAFT_PATH, HEAD_PATH, TARGET_PATH

    return [
        *("--model-path", str(TARGET_PATH)),
        *("--speculative-draft-model-path", str(DRAFT_PATH)),
        *("--speculative-parse-compose", "eagle3"),
        *("--speculative-parse-eagle-model-path", str(HEAD_PATH)),
        *("--max-total-tokens", "4096"),
    ]


def sparse_pair(folder):
    from tests.support import sparse_attention
    from tests.support.sparse_models import SPARSE

    sparse_attention.install()
    family = SPARSE["deepseek_v32"]
    return [
        *("--model-path", str(family.build(folder / "target"))),
        *("--speculative-draft-model-path", str(family.build_draft(folder / "draft"))),
        *family.flags,
    ]


def main() -> None:
    folder, *kind = sys.argv[1:]
    folder, is_sparse = Path(folder), kind == ["sparse"]
    os.environ["SGLANG_PARSE_CPU_PLATFORM"] = "1"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    torch.set_num_threads(1)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from benchmarks.gpu.engine import Engine
    from sglang_parse.proof import plain_path
    from sglang_parse.proof.path_checks import open_checks
    from sglang_parse.proof.proof_record import ProofRecord
    from sglang_parse.proof.prover import Prover
    from tests.support import cpu_graphs

    cpu_graphs.install(prefills=True)
    engine = Engine(
        [
            *(sparse_pair if is_sparse else embedded_pair)(folder),
            *("--speculative-algorithm", "PARSE", "--max-running-requests", "16"),
            *("--speculative-parse-prove", "off"),
        ]
    )
    parts, rounds = engine.parse.parts, engine.parse.batches.engine
    # An index selects all tokens of such short texts; the proof adds a longer one.
    plain_path.LENGTHS = (9, 12, 15) if is_sparse else (9, 20, 33)
    free = engine.allocator.available_size()
    for name, (wanted, changes) in (sparse_faults if is_sparse else faults)().items():
        os.environ["XDG_CACHE_HOME"] = str(folder / name)
        paths = parts.verifier.paths
        paths.states.clear()
        prover = Prover(paths, parts.ranks, ProofRecord("one"), "fast")
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for owner, attribute, broken in changes:
                stack.enter_context(patch.object(owner, attribute, broken))
            for check in open_checks(parts, rounds, is_full=False):
                if wanted in ("none", check.name):
                    prover.settle(check)
        assert engine.allocator.available_size() == free, "slots are lost"
        assert not engine.table.any(), "rows are not given back"
        line = json.dumps({"fault": name, "path": wanted, "paths": paths.as_dict()})
        sys.stdout.write(f"found {line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
