"""How the built-in model is trained. Not part of the installed package."""
