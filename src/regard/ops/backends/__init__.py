"""Backends: adapters that say what they object to in a call, and run it."""
