"""A scheduler of a TinyEngine, in a process that tests.support.warm_child has forked.

Source: sglang/srt/managers/scheduler.py, `run_scheduler_process`, less the signal to
its parent, which is the process that forks all others.
"""

import json
import os
import sys

import torch
import zmq
from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
from sglang.srt.server_args import PortArgs, prepare_server_args

from tests.support.tiny_engine import SHOW_ALL_ENV, SPARSE_ENV


def show_all() -> None:
    """Heads draft in every round, and rows cost nothing: whole chains are shown."""
    from sglang_parse.policy.gate import ChainRule, Gate

    Gate.chain_rule = lambda self, bs, chain: ChainRule(least=0.0, fixed=0.0)
    Gate.asks_head = lambda self, bs, chain: True


def main() -> None:
    """Serve until killed, once the socket of the test has been told so."""
    argv, ports, rank, started = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    test = zmq.Context.instance().socket(zmq.PUSH)
    test.connect(started)
    if os.environ.get(SHOW_ALL_ENV):
        show_all()
    if os.environ.get(SPARSE_ENV):
        from tests.support.sparse_attention import install

        install()
    server_args = prepare_server_args(argv)
    server_args.resolve_once()
    server_args.check_server_args()
    world_rank = spawn_world_rank(server_args, tp_rank=rank, pp_rank=0)
    publish(
        server_args,
        role="scheduler",
        ranks=SpawnRanks(world_rank=world_rank, dp_rank=None, gpu_id=0),
    )
    configure_scheduler_process(server_args, 0)
    scheduler = Scheduler(server_args, PortArgs(**ports))
    test.send(b"")
    scheduler.run_event_loop()


if __name__ == "__main__":
    main()
