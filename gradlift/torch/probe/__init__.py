"""A probe: what the gradients of one step looked like, brought to the host."""
