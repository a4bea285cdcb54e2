"""When the number that breaks is not a gradient: find the first bad tensor, and mend its module."""
