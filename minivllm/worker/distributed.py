"""Group: what ranks say to each other while they compute. NCCL between GPUs, gloo between CPUs.

It uses torch's backends directly, without torch's one default process group: so two engines can live in one process, and nothing else in it
is touched. Knows no model and no process; who starts and ends the ranks is `crew.py`. Built in notebook 10.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d

from minivllm.layers.parallel import Ranks

#: Ranks that are stuck are found and ended by the crew, long before.
_TIMEOUT = timedelta(hours=1)
_PATIENCE = 10.0  # seconds
#: NCCL's own watchdog ends the whole process, a notebook's too, when a rank is lost; the crew reports it instead.
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
LOOPBACK = "127.0.0.1"


class PeerLost(RuntimeError):
    """Another rank ended, or did not take part."""


class Group(Ranks):
    """Rank `rank` of `size`. `connect` must come before the first step.

    overlap_chunk_size: tokens; sums of more are computed in chunks of so many, and a chunk is added up while the next one is computed.
    """

    def __init__(self, rank: int, size: int, overlap_chunk_size: int | None = None):
        self.rank, self.size, self.overlap_chunk_size = rank, size, overlap_chunk_size
        self._stream: torch.cuda.Stream | None = None  # of the sums that run beside a computation; on GPUs only
        self._backend: Any = None
        self._store: dist.Store | None = None  # at rank 0 its server, which must live as long as the group
        self._reduce, self._gather = dist.AllreduceOptions(), distributed_c10d.AllgatherOptions()
        for options in (self._reduce, self._gather):
            if hasattr(options, "asyncOp"):  # torch 2.8: on the caller's stream, without a detour over NCCL's own
                options.asyncOp = False

    def connect(self, store: dist.Store, device: torch.device, local: bool) -> None:
        """Meet the others through `store`; returns when all are there. local: all of them are processes of this machine."""
        self._store, self._device = store, device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device, priority=-1)  # first in line when a processor becomes free
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            with _environment(_NO_WATCHDOG):
                self._backend = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        elif local:
            options = dist.ProcessGroupGloo._Options()
            options._timeout, options._devices = _TIMEOUT, [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            self._backend = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, self.rank, self.size, _TIMEOUT)
        count = self.all_reduce(torch.ones(1, device=device)).item()  # NCCL makes its communicator here
        if count != self.size:
            raise PeerLost(f"{count:g} ranks of {self.size} took part in the first all-reduce")

    def all_reduce(self, x: Tensor) -> Tensor:
        self._wait_for([self._start_all_reduce(x)])
        return x

    def sum_of(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.overlap_chunk_size is None or len(x) <= self.overlap_chunk_size:
            return super().sum_of(product, x)
        parts, works = [], []
        for rows in x.split(self.overlap_chunk_size):
            parts.append(product(rows))
            with self._beside():
                works.append(self._start_all_reduce(parts[-1]))
        self._wait_for(works)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return torch.cat(parts)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is started here waits for what was computed so far, and what is computed next does not wait for it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _start_all_reduce(self, x: Tensor) -> dist.Work | None:
        try:
            return self._backend.allreduce([x], self._reduce)
        except RuntimeError as error:
            raise PeerLost(f"the all-reduce of rank {self.rank} failed: {error}") from error

    def _wait_for(self, works: list[dist.Work | None]) -> None:
        try:
            for work in works:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            work = None  # a kept traceback must not keep the connections
            works.clear()
            raise PeerLost(f"the all-reduce of rank {self.rank} failed: {error}") from error

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank gets all, though one would do: one collective of equal parts, which a CUDA graph can hold."""
        x = x.contiguous()
        parts = x.new_empty(self.size * len(x), x.shape[1])  # [size * R, n]
        try:
            work = self._backend._allgather_base(parts, x, self._gather)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            work = None
            raise PeerLost(f"the all-gather of rank {self.rank} failed: {error}") from error
        return parts.view(self.size, *x.shape).transpose(0, 1).reshape(len(x), -1)  # [R, size * n]

    def smallest(self, number: int) -> int:
        numbers = self.all_gather(torch.tensor([[number]], device=self._device))
        return int(numbers.min())

    def abort(self) -> threading.Thread | None:
        """Let go whatever waits for another rank on a GPU. From any thread. (gloo notices by itself that a process ended.)

        In a thread of its own: NCCL lets go at once, but comes back only when no CUDA graph holds its kernels any more.
        """
        backend = self._backend
        if backend is None or isinstance(backend, dist.ProcessGroupGloo):
            return None
        thread = threading.Thread(target=backend.abort, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Each rank for itself: nothing waits for the others. CUDA graphs with its kernels must be gone."""
        if (thread := self.abort()) is not None:
            thread.join(_PATIENCE)
        self._backend = self._store = None


def serve_store() -> tuple[dist.Store, tuple[str, int]]:
    """A store for ranks of this machine, and its address: a free port, which only this machine can reach."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5),
                          master_listen_fd=listener.detach())
    return store, (LOOPBACK, port)


def join_store(address: tuple[str, int]) -> dist.Store:
    return dist.TCPStore(*address, is_master=False, timeout=timedelta(minutes=5))


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """What the user set stays as it is."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
