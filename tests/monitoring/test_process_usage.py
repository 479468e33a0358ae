import os
import subprocess
import sys

import psutil
import pytest
from benchmarks.memory import sample_tree

WAIT = "import sys; block = bytearray(b'x' * (64 << 20)); print('up', flush=True); sys.stdin.read()"


def test_a_tree_counts_the_memory_and_threads_of_its_children() -> None:
    tree = psutil.Process()
    before = sample_tree(tree, 0)
    child = subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    during = sample_tree(tree, 0)
    child.communicate()
    assert during.processes == before.processes + 1
    assert during.threads == before.threads + 1
    assert during.pss - before.pss > 48 << 20
    assert sample_tree(tree, 0).processes == before.processes


def test_open_files_are_counted() -> None:
    tree = psutil.Process()
    before = sample_tree(tree, 0).fds
    read_end, write_end = os.pipe()
    assert sample_tree(tree, 0).fds == before + 2
    os.close(read_end)
    os.close(write_end)


def test_sampling_a_tree_whose_root_is_gone_raises() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    tree = psutil.Process(child.pid)
    child.wait()
    with pytest.raises(psutil.NoSuchProcess):
        sample_tree(tree, 0)
