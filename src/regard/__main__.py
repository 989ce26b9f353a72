"""Entry point of `python -m regard`, and of `torchrun --nproc-per-node 2 -m regard train ...` on several processes."""

from .cli import main

main()
