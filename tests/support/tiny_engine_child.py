"""The process that is forked for each scheduler of a TinyEngine; imported once.

Source: sglang/srt/managers/scheduler.py, `run_scheduler_process`, less the signal to
its parent, which is the process that forks all others.
"""

import os
import sys
import traceback

import torch
from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
from sglang.srt.server_args import PortArgs, prepare_server_args

# What a scheduler imports when it starts.
import sglang_parse.plugin.worker  # noqa: F401

SHOW_ALL_ENV = "SGLANG_PARSE_TEST_SHOW_ALL"


def set_retraction() -> None:
    """SGLang's own test switch, which it has read where it was imported."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()


def show_all() -> None:
    """Heads draft in every round, and rows cost nothing: whole chains are shown."""
    from sglang_parse.policy.gate import ChainRule, Gate

    Gate.chain_rule = lambda self, bs, chain: ChainRule(least=0.0, fixed=0.0)
    Gate.asks_head = lambda self, bs, chain: True


def run(argv, ports, rank, pipe, log, environment) -> None:
    """Serve until killed. Sends one sentence through `pipe` if that cannot begin."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if log:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    try:
        set_retraction()
        if os.environ.get(SHOW_ALL_ENV):
            show_all()
        load_plugins()
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
        pipe.send(scheduler.get_init_info())
        scheduler.run_event_loop()
    except BaseException as e:
        traceback.print_exc()
        sys.stderr.flush()
        try:
            pipe.send(f"{type(e).__name__}: {e}")
        finally:
            os._exit(1)
