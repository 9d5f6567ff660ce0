"""One torch thread: the tests are small, and bits do not depend on the machine's cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
