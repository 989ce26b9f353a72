"""`python -m regard`, and `torchrun --nproc-per-node 2 -m regard train ...` for several processes."""

from .cli import main

main()
