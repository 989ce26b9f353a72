"""The tape: recorded attention by layer, its labels, summaries and file format."""
