"""Several devices for one model: branches over replicas, tensors within one, and their faults."""
