"""Shared by every test: one thread a process, so that workers do not fight over cores and results repeat."""

import torch
from hypothesis import settings

torch.set_num_threads(1)

# A busy machine makes a slow example, not a wrong one.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
