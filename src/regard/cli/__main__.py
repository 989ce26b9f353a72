"""`python -m regard.cli`, and `torchrun --nproc-per-node 2 -m regard.cli train ...` for several processes."""

from . import main

main()
