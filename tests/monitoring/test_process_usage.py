import os
import subprocess
import sys

import psutil
import pytest

from outpace.monitoring.efficiency import ProcessTree

WAIT = "import sys; block = bytearray(b'x' * (64 << 20)); print('up', flush=True); sys.stdin.read()"


def test_a_tree_counts_the_memory_and_threads_of_its_children() -> None:
    tree = ProcessTree()
    before = tree.sample()
    child = subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    during = tree.sample()
    child.communicate()
    assert during.processes == before.processes + 1
    assert during.threads == before.threads + 1
    assert during.pss - before.pss > 48 << 20
    assert tree.sample().processes == before.processes


def test_open_files_are_counted() -> None:
    tree = ProcessTree(os.getpid())
    before = tree.sample().fds
    read_end, write_end = os.pipe()
    assert tree.sample().fds == before + 2
    os.close(read_end)
    os.close(write_end)


def test_sampling_a_tree_whose_root_is_gone_raises() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    tree = ProcessTree(child.pid)
    child.wait()
    with pytest.raises(psutil.NoSuchProcess):
        tree.sample()
