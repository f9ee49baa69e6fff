"""`dipaco.modules.device`: told to a process of its own, because it cannot be taken back."""

import subprocess
import sys

SCRIPT = """
import resource, sys
import torch
from dipaco.modules.device import keep_freed_memory
told = keep_freed_memory() if sys.argv[1] == "keep" else True
assert told
def work():
    return float(sum(torch.ones(2**20) .mul_(step).sum() for step in range(20)))
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(work(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

THREADS = """
import resource, threading
from pathlib import Path
from dipaco.modules.device import keep_freed_memory
assert keep_freed_memory()
def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
def work():
    bytearray(b"1") * 2**22
    done.release()
    over.wait()
done, over = threading.Semaphore(0), threading.Event()
bytearray(b"1") * 2**22
before = resident_mib()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
    done.acquire()
print(resident_mib() - before)
over.set()
"""


def page_faults(mode):
    """Return the result and the page faults of twenty tensors of 4 MiB, taken and freed."""
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode], stdout=subprocess.PIPE, check=True, timeout=280
    ).stdout.split()
    return output[0].decode(), int(output[1])


def test_freed_memory_is_taken_again_without_page_faults_and_results_are_the_same():
    result, faults = page_faults("keep")
    plain_result, plain_faults = page_faults("plain")
    assert result == plain_result
    # 4 MiB are 1024 pages, unless the kernel gives out larger ones.
    assert faults < 64 <= plain_faults or plain_faults < 64


def test_what_one_thread_freed_another_takes():
    command = [sys.executable, "-c", THREADS]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=280).stdout
    # Each of eight had 4 MiB.
    assert float(output) < 16
