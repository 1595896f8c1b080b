"""One thread per operator: members are threads themselves, and sums then have one order."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
