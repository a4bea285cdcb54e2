"""Stock optimizers in two passes over memory: check and norm, then clip, unscale and update."""
