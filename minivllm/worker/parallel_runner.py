"""ParallelRunner: rank 0 of several, each on its own GPU with its part of every layer and of the KV cache (tensor parallelism).

To the engine it is a ModelRunner: it computes rank 0's part as one does, after telling the other ranks to do the same. The step goes to
them as a message over a socket (worker/wire.py), not as a broadcast of the process group: a broadcast would need a second group on the
CPU, could not be waited for beside a dying process, and is slower. Only rank 0 draws tokens; the next plan brings them to the others.
All-reduces run in the stream of the layers between which they stand, unless `overlap_chunk_size` says otherwise. Built in notebook 10.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine.step import StepPlan, StepResult
from minivllm.models import ModelConfig
from minivllm.weights.checkpoint import Checkpoint
from minivllm.worker import torchrun
from minivllm.worker.crew import STEP, Crew, RankError, spawn
from minivllm.worker.distributed import Group, PeerLost, serve_store
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.parallel_checks import check_size, first_device, given_to_ranks
from minivllm.worker.wire import PlanWriter

_STEP_TIMEOUT = float(os.environ.get("MINIVLLM_RANK_TIMEOUT", 300))
_CALL_TIMEOUT = 4 * _STEP_TIMEOUT  # graphs are captured, or the largest steps tried


class ParallelRunner(ModelRunner):
    """Raises ValueError for a number of ranks that the model or the machine cannot have, RankError when another rank fails."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        size = config.tensor_parallel_size
        check_size(ModelConfig.from_dict(checkpoint.config, checkpoint.generation_config), size)
        launched = torchrun.launched()
        if launched and launched[1] != size:
            raise ValueError(f"LLM.tensor_parallel_size is {size}, but the launcher started {launched[1]} processes: make them equal")
        if launched and launched[0] > 0:
            torchrun.serve_and_leave()
        device = first_device(config.device, size, bool(launched))
        given = given_to_ranks(checkpoint, config, size)
        self._writer, self._leading, self._launched = PlanWriter(), True, bool(launched)
        self.group = Group(0, size, config.overlap_chunk_size)
        self.crew = torchrun.join_as_rank_0() if launched else spawn(size)
        self.crew.on_failure = self.group.abort
        self._release = weakref.finalize(self, _release, self.crew, self.group, self._launched)  # if nobody closes it
        atexit.register(_close, weakref.ref(self))
        try:
            sent = replace(config, device=device, policy="fcfs")  # a policy may be a function, and is the engine's alone
            for rank, link in self.crew.links.items():
                link.send_bytes(_call("setup", sent, rank, size, given))
            super().__init__(replace(config, device=device), checkpoint, self.group)
            self.crew.collect()
            self._connect()
        except BaseException as error:
            try:
                self._give_up(error)
            finally:
                self.close() if hasattr(self, "memory_limit") else self._release()  # made so far as to be closed, or not even that
            raise

    def limits(self, config: EngineConfig) -> dict[str, int]:
        """The pool is as large as the rank with the least room allows."""
        own, *others = self._on_all("limits", replace(config, policy="fcfs"))
        return {**own, "num_kv_blocks": min(limits["num_kv_blocks"] for limits in (own, *others))}

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self._on_all("allocate", num_blocks, block_size)

    def release_pool(self) -> None:
        self._on_all("release_pool")

    def capture(self, config: EngineConfig) -> None:
        """Each rank captures its own graphs; NCCL's kernels are in them like any other."""
        self._on_all("capture", replace(config, policy="fcfs"))

    def execute(self, plan: StepPlan) -> StepResult:
        own = functools.partial(super().execute, plan)
        if not self._leading:
            return own()
        return self._together(lambda: self.crew.send(STEP + self._writer.encode(plan)), own, _STEP_TIMEOUT)

    def elsewhere(self, function: str, *args: Any) -> list[Any]:
        """What `function` ("module:name", given a rank's runner and `args`) returns on each rank above 0."""
        return self._together(lambda: self.crew.call("run", function, *args), self.crew.collect, _CALL_TIMEOUT)

    def everywhere(self, function: Callable, *args: Any) -> list[Any]:
        """What a function of a module returns on each rank, rank 0's first. It may use the group, if it does so on all alike."""
        def both() -> list[Any]:
            own = function(self, *args)
            return [own, *self.crew.collect()]

        return self._together(lambda: self.crew.call("run", f"{function.__module__}:{function.__qualname__}", *args), both, _CALL_TIMEOUT)

    def close(self) -> None:
        """Give back everything, the processes included. Never waits for long, whatever state they are in."""
        self._leading = False
        if self._launched and self._release.alive and self.crew.failure is None:
            try:
                self.crew.call("close")
                self.crew.collect()
            except (RankError, OSError):
                pass  # they have ended, which is what was asked for
        for graph, _ in self.graphs.graphs.values() if getattr(self, "graphs", None) else ():
            graph.reset()  # they hold kernels of the group, which waits for them; and the traceback of an error may hold one of them
        super().close()
        self._release()

    def _connect(self) -> None:
        """Let the ranks meet. In a thread: rank 0 would else wait for one that has died."""
        store, address = (torchrun.store(name := f"group{_count()}"), name) if self._launched else serve_store()
        self.crew.expect_within(_STEP_TIMEOUT)
        self.crew.call("connect", address)
        errors: list[BaseException] = []

        def connect() -> None:
            try:
                self.group.connect(store, self.device, local=not self._launched)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            self.crew.check()
        if errors:
            raise errors[0]
        self.crew.collect()
        self.crew.expect_within(None)

    def _on_all(self, name: str, *args: Any) -> list[Any]:
        """Run a method of ModelRunner on every rank; [rank 0's result, rank 1's, ...]. Inside one, the others follow by themselves."""
        method = functools.partial(getattr(super(), name), *args)
        if not self._leading:
            return [method()]

        def both() -> list[Any]:
            self._leading = False
            try:
                own = method()
            finally:
                self._leading = True
            return [own, *self.crew.collect()]

        return self._together(lambda: self.crew.call(name, *args), both, _CALL_TIMEOUT)

    def _together(self, tell: Callable[[], None], own: Callable[[], Any], seconds: float) -> Any:
        """Tell the ranks, then do rank 0's part. An error in either is the end of all; an interrupt waits until both are done."""
        if not self._release.alive:
            raise RuntimeError("this LLM's ranks have ended: make a new one")
        self.crew.check()
        with _interrupts_wait():
            try:
                self.crew.expect_within(seconds)
                tell()
                result = own()
                self.crew.expect_within(None)
                self.crew.check()  # what a GPU computed after its group was let go is nothing
            except BaseException as error:
                self._give_up(error)
                raise
        return result

    def _give_up(self, error: BaseException) -> None:
        """The ranks end. If one of them is the cause, raise what it reported instead of rank 0's own error."""
        if isinstance(error, PeerLost):
            self.crew.wait_for_failure(3.0)
        if self.crew.failure is None:
            self.crew.fail(f"rank 0 failed in a step, and the other ranks were ended with it ({type(error).__name__}: {error})")
        elif isinstance(error, RuntimeError) and not isinstance(error, RankError):  # a ValueError says itself what is wrong
            raise RankError(self.crew.failure) from error


def _call(name: str, *args: Any) -> bytes:
    return b"C" + pickle.dumps((name, args), pickle.HIGHEST_PROTOCOL)


def _close(reference: weakref.ref) -> None:
    """At exit."""
    if (runner := reference()) is not None and runner._release.alive:
        runner.close()


def _release(crew: Crew, group: Group, launched: bool) -> None:
    crew.on_failure = None
    group.close()
    if launched:
        crew.busy = False
    else:
        crew.end()


_groups = iter(range(1 << 62))


def _count() -> int:
    return next(_groups)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C inside is answered at the end: ranks that stopped at different places could not go on together."""
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield
        return
    came: list[tuple] = []
    before = signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])
