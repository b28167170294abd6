"""Once a server is warm, no mix of prompts and decode rows makes it compile, which would stop all for seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

from support import kernel_variants

ROOT = Path(__file__).parents[3]
MOST_IN_WARM_UP = 78


def test_steps_of_all_mixes_need_the_variants_that_warm_up_made() -> None:
    path = os.pathsep.join(str(ROOT / part) for part in ("kernels", "backend", "tests"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, str(Path(kernel_variants.__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["later"] == []
    assert 20 <= found["warm_up"] <= MOST_IN_WARM_UP
