"""Crew: the ranks beside rank 0, as rank 0 sees them: started, spoken to, watched, ended.

They are processes of their own, `python -m minivllm.worker.rank`: the user's script is not imported again, so it needs no guard, and CUDA
is not forked. Each has a socket to rank 0. One thread reads all of them, so that a rank which fails or dies is known at once, whatever
rank 0 waits for; then the others are ended too, for none could go on. Knows no model. Built in notebook 10.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

STEP, CALL = b"S", b"C"
#: Seconds. A rank that lost its peer may know less than the one that failed: its report waits this long for a better one.
_BETTER_REPORT = 1.0
_GOODBYE = 5.0


class RankError(RuntimeError):
    """Another rank failed, and the model with it. The message holds its traceback, or how it ended."""


class Crew:
    """Ranks 1 to n over `links`. processes: those of them that this process started. on_failure: called by the reading thread, once."""

    def __init__(self, links: dict[int, Connection], processes: dict[int, subprocess.Popen] | None = None):
        self.links, self.processes = links, processes or {}
        self.failure: str | None = None
        self.on_failure: Callable[[], None] | None = None
        self._replies: queue.Queue = queue.Queue()
        self._failed, self._ending = threading.Event(), False
        self._deadline: float | None = None
        self._reader = threading.Thread(target=self._read, name="minivllm-crew", daemon=True)
        self._reader.start()

    def send(self, data: bytes) -> None:
        """To every rank. A rank that is gone is not this method's to report."""
        for link in self.links.values():
            try:
                link.send_bytes(data)
            except OSError:
                self._failed.wait(_GOODBYE)
                self.check()
                raise

    def call(self, name: str, *args: Any) -> None:
        """Have every rank run `name`; `collect` waits for the answers."""
        self.send(CALL + pickle.dumps((name, args), pickle.HIGHEST_PROTOCOL))

    def collect(self) -> list[Any]:
        """Every rank's answer to the last call, rank 1's first. Raises RankError as soon as one fails."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self.links):
            self.check()
            rank, answer = self._replies.get()
            answers[rank] = answer
        return [answers[rank] for rank in sorted(self.links)]

    def expect_within(self, seconds: float | None) -> None:
        """From now on what is under way must be over in `seconds`, or it counts as a failure; None: nothing is under way."""
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def check(self) -> None:
        if self.failure is not None:
            raise RankError(self.failure)

    def wait_for_failure(self, seconds: float) -> bool:
        return self._failed.wait(seconds)

    def fail(self, reason: str) -> None:
        """It is over: end the processes, and let go what waits for them."""
        if self.failure is None:
            self.failure = reason
        self._failed.set()
        self._replies.put((0, None))
        for process in self.processes.values():
            process.kill()
        if not self.processes:
            self._hang_up()
        if self.on_failure is not None:
            self.on_failure()

    def end(self) -> None:
        """Close the links, which ends the ranks, and wait for them. Safe to call twice."""
        self._ending = True
        self._hang_up()
        for process in self.processes.values():
            try:
                process.wait(0 if self.failure else _GOODBYE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._reader is not threading.current_thread():
            self._reader.join()
        for link in self.links.values():
            link.close()

    def _hang_up(self) -> None:
        """Both ends then read the end of the stream; the file descriptors stay until the thread has left them."""
        for link in self.links.values():
            if not link.closed:
                with socket.socket(fileno=os.dup(link.fileno())) as side:
                    try:
                        side.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass  # the other end was faster

    def _read(self) -> None:
        ranks = {link: rank for rank, link in self.links.items()}
        lost: tuple[float, str] | None = None  # (until when a better report may come, this one)
        while ranks and not self._failed.is_set():
            for link in wait(list(ranks), timeout=0.5):
                kind, answer = self._receive(link, ranks[link])
                if kind == "done":
                    self._replies.put((ranks[link], answer))
                    continue
                del ranks[link]
                if kind == "lost":
                    lost = lost or (time.monotonic() + _BETTER_REPORT, answer)
                elif not self._ending:
                    return self.fail(answer)
            if lost and time.monotonic() > lost[0]:
                return self.fail(lost[1])
            if self._deadline is not None and time.monotonic() > self._deadline and not self._ending:
                return self.fail("the ranks did not finish in time: one of them is stuck (MINIVLLM_RANK_TIMEOUT sets the seconds a step may take)")
        if lost:
            self.fail(lost[1])

    def _receive(self, link: Connection, rank: int) -> tuple[str, Any]:
        """("done", answer), ("failed" or "lost", report), or ("gone", how the rank ended)."""
        try:
            kind, answer = pickle.loads(link.recv_bytes())
        except (EOFError, OSError):
            return "gone", f"rank {rank} ended while it was needed{self._how_it_ended(rank)}"
        return kind, answer if kind == "done" else f"rank {rank} failed:\n{answer}"

    def _how_it_ended(self, rank: int) -> str:
        if rank not in self.processes or self._ending:
            return ""
        try:
            code = self.processes[rank].wait(_GOODBYE)
        except subprocess.TimeoutExpired:
            return ": it closed its connection"
        return f": killed by {signal.Signals(-code).name}" if code < 0 else f" with exit status {code}: its own output says why"


def spawn(size: int) -> Crew:
    """Start ranks 1 to `size` - 1 on this machine. They end when this process does, however it ends."""
    links, processes = {}, {}
    in_main = threading.current_thread() is threading.main_thread()  # a signal at the parent's death comes at its thread's
    try:
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                command = [sys.executable, "-m", "minivllm.worker.rank", str(theirs.fileno()), str(os.getpid() if in_main else 0)]
                processes[rank] = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
                                                   env=_environment())
                links[rank] = Connection(ours.detach())
        return Crew(links, processes)
    except BaseException:
        for process in processes.values():
            process.kill()
            process.wait()
        for link in links.values():
            link.close()
        raise


def _environment() -> dict[str, str]:
    """This process's own, with its import path, without a launcher's words; what rank 0 has fetched from a hub is there: no need to ask."""
    package = str(Path(__file__).resolve().parents[2])
    path = [package, *(entry for entry in sys.path if entry)]
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**own, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "HF_HUB_OFFLINE": "1"}
