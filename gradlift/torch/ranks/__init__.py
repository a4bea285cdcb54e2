"""Several ranks that decide as one."""
