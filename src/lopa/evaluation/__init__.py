"""Built-in tasks: problems generated from a seed, and the code that scores answers to them."""
