"""Terms: read a kernel's arguments as score, mask, bias and normalizer."""
