"""Ranks act on the first rank's measurements."""

import multiprocessing
from types import SimpleNamespace

import torch

from sglang_parse.ranks import Ranks


def test_a_rank_alone_keeps_its_value():
    """Red if a server without tensor parallelism needs a process group."""
    assert Ranks(SimpleNamespace(world_size=1)).agree(7) == 7


def run_rank(rank: int, path: str, found) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2
    )
    group = SimpleNamespace(
        world_size=2, ranks=[0, 1], cpu_group=torch.distributed.group.WORLD
    )
    ranks = Ranks(group)
    # What each measured differs, and differs again the next round.
    found.put((rank, [ranks.agree(10 + rank), ranks.agree(1 << (30 + rank))]))
    torch.distributed.destroy_process_group()


def test_all_ranks_get_the_first_ones_value(tmp_path):
    """Red if ranks draft windows of different lengths: their next collective hangs."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    args = [(rank, str(tmp_path / "store"), found) for rank in range(2)]
    processes = [context.Process(target=run_rank, args=a) for a in args]
    for process in processes:
        process.start()
    try:
        results = dict(found.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    assert results == {0: [10, 1 << 30], 1: [10, 1 << 30]}
