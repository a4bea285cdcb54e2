"""Triton kernels; each has a plain reference in torch beside its caller."""
