"""Ranks act on the first rank's measurements."""

import multiprocessing
from types import SimpleNamespace

import torch

from sglang_parse.sgl.ranks import Ranks


def test_a_rank_alone_keeps_its_value():
    """Red if a server without tensor parallelism needs a process group."""
    ranks = Ranks(SimpleNamespace(world_size=1))
    assert ranks.agree(7) == 7
    assert ranks.agree_all([(1, 2), (), (3,)]) == [(1, 2), (), (3,)]


def run_rank(rank: int, path: str, found) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2
    )
    group = SimpleNamespace(
        world_size=2, ranks=[0, 1], cpu_group=torch.distributed.group.WORLD
    )
    ranks = Ranks(group)
    # What each measured differs, and differs again the next round.
    own = [ranks.agree(10 + rank), ranks.agree(1 << (30 + rank))]
    own.append(ranks.agree_all([(), (0.1 + rank, 1 / 3), (float(rank),)]))
    own.append(ranks.agree_all([(rank, 2), ()]))
    own.append(ranks.agree_all([(), ()]))
    found.put((rank, own))


def test_all_ranks_get_the_first_ones_value(tmp_path):
    """Red if what ranks draft or judge differs: their next collective hangs."""
    # Forked: a new interpreter would import torch first, which takes minutes on a busy
    # machine.
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    args = [(rank, str(tmp_path / "store"), found) for rank in range(2)]
    processes = [context.Process(target=run_rank, args=a) for a in args]
    for process in processes:
        process.start()
    try:
        results = dict(found.get(timeout=300) for _ in processes)
    finally:
        # A forked rank may hang where it leaves its group.
        for process in processes:
            process.kill()
            process.join()
    lists = [[(), (0.1, 1 / 3), (0.0,)], [(0, 2), ()], [(), ()]]
    assert results == {rank: [10, 1 << 30, *lists] for rank in range(2)}
