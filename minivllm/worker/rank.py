"""A rank above 0: it makes its part of the model, then does what rank 0 says until the connection ends. `python -m minivllm.worker.rank`.

It ends with rank 0, however that ends: by the closed connection, or, should it be stuck in a step then, by a thread that watches for that;
on Linux the kernel ends it too. Whatever goes wrong here is reported to rank 0 and is the end of this process. Built in notebook 10.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from minivllm import attention
from minivllm.config import EngineConfig
from minivllm.engine.step import PlanRow, StepPlan, StepResult
from minivllm.models import register_model
from minivllm.weights.hub import open_model
from minivllm.worker.crew import STEP
from minivllm.worker.distributed import Group, PeerLost, join_store
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.wire import PlanReader

_PR_SET_PDEATHSIG = 1
_GRACE = 3.0  # seconds to leave by oneself after rank 0 has gone


class RankRunner(ModelRunner):
    """A ModelRunner that draws no token: rank 0 does, and the next plan brings what it drew."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the host's arrays are free for the next plan
        return result

    def _sample(self, rows: list[PlanRow], logits: Tensor, batch: Any) -> StepResult:
        return StepResult()


class Member:
    """One rank's side of an LLM's life. Its public methods are what rank 0 can call, beside those of its runner."""

    def __init__(self) -> None:
        self.runner: RankRunner | None = None
        self.group: Group | None = None
        self.reader = PlanReader()

    def setup(self, config: EngineConfig, rank: int, size: int, given: dict[str, Any]) -> None:
        """Make this rank's part of the model. given: what the user registered or set in rank 0's process."""
        if given["model"] is not None:
            register_model(*given["model"])
        if given["backend"] is not None:
            attention.register_backend(*given["backend"])
        torch.set_float32_matmul_precision(given["precision"])
        if given["threads"]:
            torch.set_num_threads(given["threads"])
        if (device := local_device(config.device, rank)).startswith("cuda"):
            torch.cuda.set_device(device)
        self.group, self.reader = Group(rank, size, config.overlap_chunk_size), PlanReader()
        self.runner = RankRunner(replace(config, device=device), open_model(config.model), self.group)

    def connect(self, address: tuple[str, int] | str) -> None:
        if isinstance(address, str):
            from minivllm.worker.torchrun import store

            return self.group.connect(store(address), self.runner.device, local=False)
        self.group.connect(join_store(address), self.runner.device, local=True)

    def run(self, function: str, *args: Any) -> Any:
        """`function` is "module:name"; it is given this rank's runner."""
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(self.runner, *args)

    def close(self) -> None:
        """Give back everything; another `setup` may follow."""
        if self.runner is not None:
            self.runner.close()
            self.group.close()
        self.runner = self.group = None

    def call(self, name: str, args: tuple) -> Any:
        return getattr(self if hasattr(self, name) else self.runner, name)(*args)


def local_device(device: str, rank: int) -> str:
    """The device of `rank`: one GPU each. Under torchrun the launcher says which; else they follow rank 0's."""
    if device == "cpu":
        return device
    if "LOCAL_RANK" in os.environ and "RANK" in os.environ:
        return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    return f"cuda:{(torch.device(device).index or 0) + rank}"


def serve(link: Connection) -> None:
    """Do what rank 0 says; returns when the connection ends. An error is reported and ends the process."""
    member = Member()
    over = _leave_when_closed(link)
    try:
        while (message := _next(link)) is not None:
            if message[:1] == STEP:
                member.runner.execute(member.reader.decode(memoryview(message)[1:]))
            else:
                link.send_bytes(pickle.dumps(("done", member.call(*pickle.loads(memoryview(message)[1:])))))
    except BaseException as error:
        try:
            link.send_bytes(pickle.dumps(("lost" if isinstance(error, PeerLost) else "failed", traceback.format_exc())))
        except OSError:
            pass  # rank 0 has gone: nobody to tell
        os._exit(1)  # at once: the usual way out may wait for a GPU that waits for another rank
    over.set()
    member.close()


def _next(link: Connection) -> bytes | None:
    try:
        return link.recv_bytes()
    except (EOFError, OSError):
        return None


def _leave_when_closed(link: Connection) -> threading.Event:
    """A thread that ends this process if rank 0 closes the connection and `serve` does not notice. The event calls it off."""
    over = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(link.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
        poll.poll()
        if not over.wait(_GRACE):
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return over


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends."""
    if sys.platform == "linux" and parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it was faster


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to answer
    _die_with(int(argv[1]))
    serve(Connection(int(argv[0])))
    os._exit(0)  # at once: all is given back, and taking torch down in order takes its time


if __name__ == "__main__":
    main(sys.argv[1:])
