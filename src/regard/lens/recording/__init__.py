"""Recording: what a capture keeps of each attention call, and where."""
