"""PyTorch: see ``GradScaler``."""
