"""Cuts inside of compiled models."""
