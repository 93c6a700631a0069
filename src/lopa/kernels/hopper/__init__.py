"""Matrix products in CUDA for Hopper (sm_90a), compiled at run time."""
