"""`minivllm bench`: measurements beside a named baseline from the same run and beside what the machine could do at best.

throughput.py and latency.py measure the engine, scheduler.py the host's cost of a step. Each prints a table and saves raw JSON.
"""
