"""Run on N GPUs what was written for several, one job a call, each of which prints its own verdict.

    PYTHONPATH=kernels:backend:client python benchmarks/several_gpus.py collectives --ranks 8 --out results
    PYTHONPATH=kernels:backend:client python benchmarks/several_gpus.py depth --ranks 8 --out results
    PYTHONPATH=kernels:backend:client python benchmarks/several_gpus.py served --ranks 4
    PYTHONPATH=kernels:backend:client python benchmarks/several_gpus.py memory --ranks 8

A job takes at most ten minutes on H200s; its exit status is 0 where every line of its verdict holds. With --cpu the
same runs over gloo, a tiny model in place of Kimi-K2.5, which proves the script and the processes and no speed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from several_gpus_suite import collectives, depth, memory, served
from several_gpus_suite.verdict import Verdict

JOBS = {"collectives": collectives.run, "depth": depth.run, "served": served.run, "memory": memory.run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="GPUs")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal: processes of this CPU over gloo")
    parser.add_argument("--out", type=Path, help="folder for what the job measured; temporary if absent")
    options = parser.parse_args()
    if options.ranks < 2 or (not options.cpu and options.ranks > torch.cuda.device_count()):
        parser.error(f"--ranks is {options.ranks}; allowed: 2 to {torch.cuda.device_count()}, the GPUs that torch sees")
    with tempfile.TemporaryDirectory() as folder:
        out: Path = options.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        verdict: Verdict = JOBS[options.job](options.ranks, is_cpu=options.cpu, out=out)
    print(verdict.text(f"{options.job}, {options.ranks} ranks{' of a CPU' if options.cpu else ''}"), flush=True)
    sys.exit(0 if verdict.holds else 1)


if __name__ == "__main__":
    main()
