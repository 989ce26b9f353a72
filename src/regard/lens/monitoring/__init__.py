"""Monitoring: the numbers of every head while a model trains, events in them, and the clip of query-key products."""
