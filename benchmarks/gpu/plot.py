"""Figures and a table from the raw results of run_all.py.

    python -m benchmarks.gpu.plot --out benchmarks/results/gpu

Writes forwards.png, serve.png and summary.md beside the JSONL files; a stage without
results is left out.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.pairs import Shape

Record = dict[str, Any]
SHAPE_FIELDS = Shape.__dataclass_fields__


def load(path: Path) -> list[Record]:
    """Records without error; the last of each cell."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return list({r["cell"]: r for r in records if "error" not in r}.values())


def only(records: Iterable[Record], **values: Any) -> list[Record]:
    return [r for r in records if all(r.get(k) == v for k, v in values.items())]


def rates(records: list[Record]) -> tuple[float, float]:
    """Measured bytes and floating-point operations a millisecond."""
    (copy,), (matmul,) = only(records, kind="copy"), only(records, kind="matmul")
    return copy["num_bytes"] / copy["ms"]["min"], matmul["flops"] / matmul["ms"]["min"]


def floor_ms(record: Record, records: list[Record]) -> float | None:
    """Least time for a cell: its bytes at copy rate or its operations at matmul rate,
    whichever takes longer. Verify passes and prefills run the LM head at few rows."""
    role = "draft" if record["kind"] == "draft" else "target"
    shapes = only(records, kind="shape", role=role)
    if not shapes or not only(records, kind="copy"):
        return None
    shape = Shape(**{f: shapes[0][f] for f in SHAPE_FIELDS})
    bytes_ms, flops_ms = rates(records)
    bs, context = record.get("bs", 1), record["context"]
    num_bytes = shape.decode_bytes(context, bs, shapes[0]["itemsize"])
    rows = record.get("num_tokens", bs)
    flops = shape.pass_flops(rows, context, record.get("segments", bs))
    return max(num_bytes / bytes_ms, flops / flops_ms)


def groups(records: list[Record]) -> dict[tuple[str, str], list[Record]]:
    """By pair and backend."""
    found = defaultdict(list)
    for r in records:
        found[r["pair"], r["backend"]].append(r)
    return dict(found)


def bound_tokens_per_ms(records: list[Record], serve: Record) -> float | None:
    """Tokens a millisecond at concurrency 1 if a round cost its forwards alone.

    W drafts cost W c_d and one pass; of them the pinned share is kept, and a bonus.
    """
    if serve.get("tp", 1) > 1:
        return None  # forwards are measured on one card
    kept = serve["pinned"].get("kept_fraction")
    window = serve["window"]
    drafts = only(records, kind="draft", context=serve["context"], bs=1)
    passes = only(records, kind="verify", context=serve["context"], window=window)
    if not kept or serve.get("fields") or not drafts or not passes:
        return None
    round_ms = window * drafts[0]["ms"]["median"] + min(
        p["ms"]["median"] for p in passes
    )
    return (kept * window + 1) / round_ms


def cell_text(record: Record | None) -> str:
    if record is None:
        return "-"
    ms = record["ms"]
    return f"{ms['median']:.2f} ({ms['min']:.2f}-{ms['max']:.2f})"


def forwards_tables(records: list[Record]) -> list[str]:
    lines = []
    for (pair, backend), group in groups(records).items():
        lines += [f"## {pair}, {backend}: forwards, ms (least-greatest)", ""]
        lines += ["| cell | context | requests | ms | floor | ratio |"]
        lines += ["|---|---|---|---|---|---|"]
        for r in (r for r in group if r.get("kind") in ("decode", "draft")):
            floor = floor_ms(r, group)
            shown = (
                f"{floor:.2f} | {r['ms']['median'] / floor:.2f}" if floor else "- | -"
            )
            cells = (r["kind"], str(r["context"]), str(r["bs"]), cell_text(r), shown)
            lines.append(f"| {' | '.join(cells)} |")
        lines += [
            "",
            "| context | W | K | mask | virtual | prefill of as many tokens |",
        ]
        lines[-1] += " K prefills | one after the other | floor |"
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        shapes = sorted(
            {
                (r["context"], r["window"], r["segments"])
                for r in group
                if r.get("kind") == "verify"
            }
        )
        for context, window, segments in shapes:
            same = only(group, context=context, window=window, segments=segments)

            def pick(
                kind: str, same: list[Record] = same, **more: Any
            ) -> Record | None:
                return next(iter(only(same, kind=kind, **more)), None)

            passes = [pick("verify", route=r) for r in ("mask", "virtual")]
            others = [pick(k) for k in ("prefill", "forks", "sequential")]
            floor = next((floor_ms(r, group) for r in passes if r), None)
            cells = [cell_text(r) for r in (*passes, *others)]
            cells.append(f"{floor:.2f}" if floor else "-")
            lines.append(f"| {context} | {window} | {segments} | {' | '.join(cells)} |")
        parity = only(group, kind="parity")
        if parity:
            worst = max(parity, key=lambda r: r["max_difference"] / r["logits_std"])
            lines += [
                "",
                f"Verdict logits by mask and by virtual sequences differ by at most "
                f"{worst['max_difference']:.2e}, standard deviation of the logits "
                f"{worst['logits_std']:.2e} ({len(parity)} shapes).",
            ]
        lines.append("")
    return lines


def serve_table(records: list[Record], forwards: list[Record]) -> list[str]:
    lines = []
    for pair in dict.fromkeys(r["pair"] for r in records):
        group = only(records, pair=pair)
        lines += [f"## {pair}: whole servers, output tokens/s (least-greatest)", ""]
        lines += ["| arm | concurrency | tokens/s | to target | share of bound |"]
        lines += ["|---|---|---|---|---|"]
        base = {
            r["concurrency"]: r["tokens_per_s"]["median"]
            for r in only(group, arm="target")
        }
        ours = [r for r in forwards if r["pair"] == pair]
        for r in group:
            speed, n = r["tokens_per_s"], r["concurrency"]
            ratio = f"{speed['median'] / base[n]:.2f}x" if n in base else "-"
            bound = bound_tokens_per_ms(ours, r) if n == 1 else None
            share = f"{speed['median'] / 1000 / bound:.0%}" if bound else "-"
            lines.append(
                f"| {r['arm']} | {n} | {speed['median']:.1f} ({speed['min']:.1f}-"
                f"{speed['max']:.1f}) | {ratio} | {share} |"
            )
        lines.append("")
    return lines


def draw_forwards(records: list[Record], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = groups([r for r in records if r.get("kind") != "shape"])
    contexts = sorted({r["context"] for r in records if "context" in r})
    panels = [(key, c) for key in found for c in contexts]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 4), squeeze=False
    )
    kinds = {
        "mask": {"kind": "verify", "route": "mask"},
        "virtual": {"kind": "verify", "route": "virtual"},
        "prefill of as many tokens": {"kind": "prefill"},
        "K prefills": {"kind": "forks"},
        "one after the other": {"kind": "sequential"},
    }
    for axis, (key, context) in zip(axes[0], panels, strict=True):
        group = only(found[key], context=context)
        most = max((r.get("segments", 0) for r in group), default=0)
        for label, values in kinds.items():
            cells = only(group, segments=most, **values)
            cells.sort(key=lambda r: r["window"])
            axis.plot(
                [r["window"] for r in cells],
                [r["ms"]["median"] for r in cells],
                marker="o",
                label=label,
            )
        axis.set(
            title=f"{key[0]}, {key[1]}\ncontext {context}, K = {most}",
            xlabel="draft tokens W",
            ylabel="ms",
            xscale="log",
            yscale="log",
        )
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_serve(records: list[Record], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = list(dict.fromkeys(r["pair"] for r in records))
    figure, axes = pyplot.subplots(
        1, len(pairs), figsize=(5 * len(pairs), 4), squeeze=False
    )
    for axis, pair in zip(axes[0], pairs, strict=True):
        group = only(records, pair=pair)
        base = {
            r["concurrency"]: r["tokens_per_s"]["median"]
            for r in only(group, arm="target")
        }
        for arm in dict.fromkeys(r["arm"] for r in group):
            cells = [r for r in only(group, arm=arm) if r["concurrency"] in base]
            cells.sort(key=lambda r: r["concurrency"])
            axis.plot(
                [r["concurrency"] for r in cells],
                [r["tokens_per_s"]["median"] / base[r["concurrency"]] for r in cells],
                marker="o",
                label=arm,
            )
        axis.set(
            title=pair,
            xlabel="concurrency",
            ylabel="output tokens/s, target = 1",
            xscale="log",
        )
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, required=True)
    out = p.parse_args().out
    forwards, serve = load(out / "forwards.jsonl"), load(out / "serve.jsonl")
    sources = {json.dumps(r["source"], sort_keys=True) for r in (*forwards, *serve)}
    lines = ["# GPU measurements", ""]
    for text in sorted(sources):
        source = json.loads(text)
        lines.append(
            f"- commit {source['commit']}, {json.dumps(source['device'])}, "
            f"{json.dumps(source['versions'])}"
        )
    lines.append("")
    lines += forwards_tables(forwards) + serve_table(serve, forwards)
    (out / "summary.md").write_text("\n".join(lines))
    print(f"wrote {out / 'summary.md'}")
    if not forwards and not serve:
        return
    try:
        if any(r.get("kind") == "verify" for r in forwards):
            draw_forwards(forwards, out / "forwards.png")
        if serve:
            draw_serve(serve, out / "serve.png")
    except ImportError as error:
        print(f"no figures here ({error}); run this again where matplotlib is")


if __name__ == "__main__":
    main()
