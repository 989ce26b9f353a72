"""The lens on small random models of other libraries, compared with the weights that those models use."""
