"""Which processes are the ranks of this one: other tests may have left it helpers of their own, such as torch.compile's."""

import psutil


def children():
    return [child for child in psutil.Process().children(recursive=True) if is_rank(child)]


def is_rank(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "minivllm.worker.rank" in process.cmdline()
    except psutil.NoSuchProcess:
        return False
