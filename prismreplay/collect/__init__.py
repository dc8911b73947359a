"""Stage 1: many logical ranks take turns on few devices, and their whole graph is written down.

`coordinator` owns the ranks' processes and decides who runs; `client` is its other end inside
a rank; `executor` performs a collective on the CPU once every member's inputs are there.
"""
