"""Stage 1: many logical ranks take turns on few devices, and their whole graph is written down.

`coordinator` decides who runs, and `serving` connects it with the ranks' processes, which `pool`
forks; `client` is its other end inside a rank; `executor` performs a collective on the CPU once
every member's inputs are there.
"""
