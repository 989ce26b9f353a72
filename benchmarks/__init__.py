"""Benchmarks: the library beside its peers, in one run."""

import os

os.environ.setdefault("REGARD_WAIT_FOR_KERNELS", "1")  # else what runs while a kernel is compiled would be measured
