"""Slices: executions in which some ranks are real, each rank in one of them.

The other ranks are virtual and arrive early; what carries over to the whole job is how long
things take. `prismcalib.merge` makes one timeline of them.
"""
