"""A process that builds the embedded target with a DFLASH draft, and compares blocks.

python -m tests.support.block_child FOLDER [MARKOV]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def main() -> None:
    os.environ["SGLANG_PARSE_CPU_PLATFORM"] = "1"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    torch.set_num_threads(1)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from benchmarks.gpu.engine import Engine
    from sglang_parse.drafting.head_model import ChainRequest, HeadRows
    from sglang_parse.embedded import TARGET_PATH
    from tests.support.block_drafts import (
        BLOCK,
        block_states,
        markov_tokens,
        write_block_draft,
    )

    markov = "".join(sys.argv[2:])
    draft = write_block_draft(Path(sys.argv[1]) / "draft", TARGET_PATH, markov=markov)
    engine = Engine(
        [
            *("--model-path", str(TARGET_PATH), "--speculative-algorithm", "PARSE"),
            *("--speculative-parse-compose", "dspark" if markov else "dflash"),
            *("--speculative-parse-eagle-model-path", str(draft)),
            *("--max-total-tokens", "2048", "--max-running-requests", "8"),
            *("--speculative-parse-prove", "off"),
        ]
    )
    (head,) = engine.parse.parts.draft_runners
    # The row of the bonus token predicts in a DSpark draft alone.
    skipped = 0 if markov else 1
    assert head.most_tokens == BLOCK - skipped
    table, draw = engine.table, torch.Generator().manual_seed(5)
    lens, bonus, num_new = (7, 12, 3), (50, 60, 70), (BLOCK - 1, 2, 4)
    features = [torch.randn(n, head.features_width, generator=draw) for n in lens]
    with torch.no_grad():
        for i, n in enumerate(lens):
            table[i, : n + BLOCK] = torch.arange(n + BLOCK) + 1 + 40 * i
        # In two parts, as prompts and passes come.
        parts = [(0, 2), (2, None)]
        for a, b in parts:
            rows = [
                HeadRows(i, a, [9] * (len(f[a:b]) - 1) + [bonus[i]], f[a:b])
                for i, f in enumerate(features)
            ]
            hints = head.follow(rows, table)
        orders = [
            ChainRequest(i, n, new, hint)
            for i, (n, new, hint) in enumerate(zip(lens, num_new, hints, strict=True))
        ]
        chains = head.propose(orders, table)
        model = head.target.model
        for i, chain in enumerate(chains):
            masks = [head.mask_id] * (num_new[i] - 1 + skipped)
            embedded = model.get_input_embeddings()(torch.tensor([bonus[i], *masks]))
            states = block_states(draft, features[i], embedded)[skipped:]
            logits = (states @ model.lm_head.weight.T)[:, : model.config.vocab_size]
            best, tokens = logits.softmax(-1).max(-1)
            wanted = list(zip(tokens.tolist(), best.tolist(), strict=True))
            if markov:
                wanted = markov_tokens(draft, logits, states, bonus[i])
            assert chain.tokens == tuple(t for t, _ in wanted), (i, chain, wanted)
            chances = torch.tensor([p for _, p in wanted])
            assert torch.allclose(torch.tensor(chain.chances), chances, rtol=1e-3)
    sys.stdout.write("blocks agree\n")


if __name__ == "__main__":
    main()
