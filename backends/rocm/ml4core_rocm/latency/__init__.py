"""Latency-specialised decode: a whole layer of a small step as one persistent kernel on each GPU,
which trades partial sums with its peers through their memory.

This is its control plane: who may have it, how ranks agree, how peers' memory is laid out, what a
wait does that never ends, and which steps go that way. The kernel itself is not in this version.

guards      every reason against a deployment, at once
agreement   ranks refuse together, before any of them waits for another
states      from the switch to the first step, and to the end
tags        what tells a value of this step from one of another
mailbox     the layout of the memory that peers write to
protocol    stores, bounded waits, the sticky fault, the exchange at a step's end
steps       which steps are taken
inputs      weights and caches as the kernel reads them
provider    the candidate for ``decoder_layer``
"""
