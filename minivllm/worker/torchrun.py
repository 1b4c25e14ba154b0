"""Ranks that a launcher started, on one machine or several: `torchrun --nproc-per-node 2 script.py`.

Every process runs the script. That of rank 0 goes on; the others stay inside `LLM(...)` and serve until rank 0's process ends, then leave.
They meet through the launcher's store (MASTER_ADDR, MASTER_PORT); the connections to rank 0 use a free port and a key from there.
Built in notebook 10.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import sys
from datetime import timedelta
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from torch import distributed as dist

from minivllm.worker.crew import Crew

_TIMEOUT = timedelta(minutes=5)
_KEY = "minivllm/rank0"
_joined: dict[str, object] = {}  # the launcher's store and, at rank 0, the crew: as many as the process has, one


def launched() -> tuple[int, int] | None:
    """(rank, number of ranks) if a launcher started this process beside others; else None."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() or int(os.environ["WORLD_SIZE"]) < 2:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def store(prefix: str) -> dist.Store:
    """A part of the launcher's store."""
    if "store" not in _joined:
        rank, size = launched()
        _joined["store"] = next(dist.rendezvous("env://", rank, size, timeout=_TIMEOUT))[0]
    return dist.PrefixStore(f"minivllm/{prefix}", _joined["store"])


def join_as_rank_0() -> Crew:
    """The crew of this process: its connections last as long as the process. Raises RuntimeError while another LLM uses it."""
    crew = _joined.get("crew")
    if crew is None or crew.failure is not None:
        if crew is not None:
            raise RuntimeError(f"the ranks that torchrun started have ended, start all of them again: {crew.failure}")
        crew = _joined["crew"] = Crew(_accept(launched()[1] - 1))
        crew.busy = False
        atexit.register(crew.end)
    if crew.busy:
        raise RuntimeError("under torchrun one LLM at a time can use the ranks: close() the other one first")
    crew.busy = True
    return crew


def serve_and_leave() -> None:
    """What `LLM(...)` does in the processes of ranks above 0. Raises SystemExit when rank 0 has ended."""
    from minivllm.worker.rank import serve

    host, port, key = store("meet").get(_KEY).decode().split()
    side = socket.create_connection((host, int(port)), timeout=_TIMEOUT.total_seconds())
    link = _link(side)
    answer_challenge(link, bytes.fromhex(key))
    deliver_challenge(link, bytes.fromhex(key))
    link.send(launched()[0])
    serve(link)
    sys.exit(0)


def _accept(count: int) -> dict[int, Connection]:
    key = secrets.token_bytes(32)
    with _listen() as listener:
        listener.settimeout(_TIMEOUT.total_seconds())
        store("meet").set(_KEY, f"{os.environ['MASTER_ADDR']} {listener.getsockname()[1]} {key.hex()}")
        links: dict[int, Connection] = {}
        while len(links) < count:
            link = _link(listener.accept()[0])
            deliver_challenge(link, key)
            answer_challenge(link, key)
            links[link.recv()] = link
    return links


def _listen() -> socket.socket:
    """A free port at the address by which the others know this machine; where that is not its own, at all its addresses."""
    try:
        return socket.create_server((os.environ["MASTER_ADDR"], 0))
    except OSError:
        return socket.create_server(("", 0))


def _link(side: socket.socket) -> Connection:
    side.settimeout(None)
    side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a step's few bytes must not wait for more
    return Connection(side.detach())
