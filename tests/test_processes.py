"""Two processes with four devices each train, evaluate and report as one process with eight."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import processes

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def of_processes(count: int) -> list[dict]:
    """What each process found, over loopback."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={8 // count}")
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    coordinator = f"localhost:{free_port()}"
    running = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/processes.py"), coordinator, str(count), str(number)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(count)
    ]  # fmt: skip
    ended = [process.communicate(timeout=300) for process in running]
    for process, (_, errors) in zip(running, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(out.partition("found: ")[2].splitlines()[0]) for out, _ in ended]


def test_two_processes_do_as_one():
    """Alike on both to the bit; beside one process within the rounding of sums in another order, 1e-6."""
    first, second = of_processes(2)
    assert first == second
    for name, right in processes.runs(processes.batch()).items():
        ours = first[name]
        assert ours["wire"] == right["wire"], name
        for part in ("losses", "norms", "evaluated", "params"):
            np.testing.assert_allclose(ours[part], right[part], rtol=1e-6, atol=1e-6, err_msg=f"{name}: {part}")
