"""Faces for existing engines.

Owns: the names and shapes that an engine's code expects. Never: orders, moves or caches by itself.
"""
