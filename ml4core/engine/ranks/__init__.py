"""The ranks of a replica, on one machine: each in a process of its own, rank 0 in the engine's.

Rank 0 schedules, samples and judges drafts. What its runner is asked for that needs every rank,
those of the others are asked for, too, in the same order.
"""
