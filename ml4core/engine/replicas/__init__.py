"""Replicas of a deployment, each an engine with requests of its own, that share the routed experts:
none can step without the others.

Replica 0's process has a hub, to which all are connected, itself included. Before a step the hub
knows whether anyone has work, and the largest of what each wants: all run that.
"""
