"""Several devices: branch parallelism, tensor parallelism, supervised ranks."""
