"""The stages of a step: loss, check, clip, step, update, record."""
