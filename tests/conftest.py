"""Shared by every test: one thread a process, so that workers do not fight over cores and results repeat."""

import torch

torch.set_num_threads(1)
